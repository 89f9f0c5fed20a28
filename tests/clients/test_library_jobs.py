"""Whole jobs of scripts for Accelerate and Lightning that do not know this library, on both of its distributions."""

from __future__ import annotations

import json
import textwrap

import pytest
from support.documents.client_strategies import SHARDED
from support.platform.jobs import artifact

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
finish(accelerator.get_state_dict(net)["0.weight"])
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


_TELLS = {"ACCELERATE_USE_SAGEMAKER": "true", "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL"}


@pytest.mark.parametrize(
    ("script", "distribution", "environment", "backend"),
    [
        pytest.param(
            *(ACCELERATE, {"dataparallel": {"enabled": True}}, _TELLS, "smddp"),
            id="Accelerate, smddp",
            marks=pytest.mark.client("Accelerate", "backend smddp", "dp 2"),
        ),
        pytest.param(
            *(LIGHTNING, {"dataparallel": {"enabled": True}}, {}, "smddp"),
            id="Lightning, smddp",
            marks=pytest.mark.client("Lightning", "backend smddp", "dp 2"),
        ),
        pytest.param(
            *(ACCELERATE, {"modelparallel": {"enabled": True, "parameters": {"ddp": True, **SHARDED}}}, {}, "gloo"),
            id="Accelerate, sharded",
            marks=pytest.mark.client("Accelerate", "a script without an import of this library", "sdp 2"),
        ),
    ],
)
def test_a_script_that_knows_its_library_only(tmp_path, script, distribution, environment, backend):
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
        distribution={"smdistributed": distribution, "mpi": {"enabled": True, "processes_per_host": 2}},
        environment=environment,
    )
    estimator.fit(logs=False)
    seen = artifact(estimator, "seen.json")
    assert seen["backend"] == backend
    assert seen["weight"] == pytest.approx(_alone(), abs=1e-5), json.dumps(seen)
