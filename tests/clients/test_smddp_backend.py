"""Accelerate and Lightning on the backend ``smddp``, in whole jobs of the data parallel library."""

from __future__ import annotations

import json
import textwrap

import pytest
from support.jobs import artifact

pytestmark = [pytest.mark.job, pytest.mark.full, pytest.mark.timeout(240)]

COMMON = """
import json, os, torch, torch.distributed as dist
ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))

def model():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

def finish(weight):
    if dist.get_rank() == 0:
        seen = {"backend": dist.get_backend(), "weight": weight.detach().flatten().tolist()}
        open(os.path.join(os.environ["SM_MODEL_DIR"], "seen.json"), "w").write(json.dumps(seen))
"""

ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator()
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(ROWS, batch_size=4)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for rows in loader:
    optimizer.zero_grad()
    accelerator.backward(net(rows).square().mean())
    optimizer.step()
finish(accelerator.unwrap_model(net)[0].weight)
"""

LIGHTNING = """
import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model()
    def training_step(self, rows, batch_idx):
        return self.net(rows).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

net = Net()
trainer = pl.Trainer(strategy=DDPStrategy(process_group_backend="smddp"), accelerator="cpu", devices=2, max_epochs=1, logger=False, 
                     use_distributed_sampler=False,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
sampler = torch.utils.data.DistributedSampler(ROWS, 2, int(os.environ["RANK"]), shuffle=False)
trainer.fit(net, torch.utils.data.DataLoader(ROWS, batch_size=4, sampler=sampler))
finish(net.net[0].weight)
"""


def _alone():
    seen = {}
    exec(textwrap.dedent(COMMON), seen)
    import torch

    net = seen["model"]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for rows in seen["ROWS"].split(8):
        optimizer.zero_grad()
        net(rows).square().mean().backward()
        optimizer.step()
    return net[0].weight.detach().flatten().tolist()


@pytest.mark.parametrize(
    ("script", "environment"),
    [
        pytest.param(
            ACCELERATE,
            {"ACCELERATE_USE_SAGEMAKER": "true", "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL"},
            id="Accelerate",
            marks=pytest.mark.client("Accelerate", "backend smddp", "dp 2"),
        ),
        pytest.param(LIGHTNING, {}, id="Lightning", marks=pytest.mark.client("Lightning", "backend smddp", "dp 2")),
    ],
)
def test_the_backend_under_a_library(tmp_path, script, environment):
    from smp_estimator import SMPEstimator

    source = tmp_path / "src"
    source.mkdir()
    (source / "train.py").write_text(COMMON + script)
    estimator = SMPEstimator(
        entry_point="train.py",
        source_dir=str(source),
        instance_type="local",
        instance_count=1,
        output_path=f"file://{tmp_path / 'out'}",
        distribution={
            "smdistributed": {"dataparallel": {"enabled": True}},
            "mpi": {"enabled": True, "processes_per_host": 2},
        },
        environment=environment,
    )
    estimator.fit(logs=False)
    seen = artifact(estimator, "seen.json")
    assert seen["backend"] == "smddp"
    assert seen["weight"] == pytest.approx(_alone(), abs=1e-5), json.dumps(seen)
