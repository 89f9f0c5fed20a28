"""SIGTERM while ``smp.auto_resume`` looks after a job: a whole checkpoint, exit code 0, and the next job goes on bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from smp_runtime.checkpoint.files.manifest import whole_checkpoints

pytestmark = pytest.mark.job

PACKAGES = Path(__file__).resolve().parents[2] / "container"
PATIENCE = 120.0

SCRIPT = """
import json
import os
import time
import torch
import smdistributed.modelparallel.torch as smp

smp.init()
torch.manual_seed(5)
module = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1)) for _ in range(4)])
smp.set_tensor_parallelism(module, smp.tp_size() > 1)
model = smp.DistributedModel(module)
torch.manual_seed(6 + smp.dp_rank())
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
own = {"losses": []}
progress = smp.auto_resume(model, optimizer, user_content=own, scheduler=scheduler)
print("begins after", int(progress), flush=True)
open(f"trains-{smp.rank()}", "w").close()

@smp.step
def step(x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

total = int(os.environ["STEPS"])
for number in progress.steps(total) if os.environ["LOOP"] == "steps" else range(progress, total):
    optimizer.zero_grad()
    loss = step(torch.randn(4, 8))
    optimizer.step()
    scheduler.step()
    own["losses"].append([float(loss.reduce_mean()), optimizer.param_groups[0]["lr"]])
    time.sleep(0.01)
if smp.rank() == 0:
    open("losses.json", "w").write(json.dumps(own["losses"]))
"""

#: Processes and settings.
TOPOLOGIES = {
    "dp2": (2, {"ddp": True}),
    "pp2": (2, {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}),
    "pp2-dp2": (4, {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}),
    "s4": (4, {"ddp": True, "sharded_data_parallel_degree": 4, "sdp_param_persistence_threshold": 10}),
    "tp2-dp2": (4, {"tensor_parallel_degree": 2, "ddp": True}),
}
ENDLESS = 10**9


class _Job:
    """A job in ``folder``, which has the checkpoints of those before."""

    def __init__(self, folder: Path, topology: str, steps: int = ENDLESS, loop: str = "steps") -> None:
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(SCRIPT)
        for file in (*folder.glob("trains-*"), *folder.glob("losses.json")):
            file.unlink()
        self.folder, (self.size, parameters) = folder, TOPOLOGIES[topology]
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("SM_", "SMP_", "SLURM", "OMPI"))}
        environ |= {"PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1", "STEPS": str(steps), "LOOP": loop}
        words = [
            "run",
            "--processes",
            str(self.size),
            "--failure-file",
            "failure",
            "--parameters",
            json.dumps(parameters),
        ]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "smp_launch", *words, "train.py"],
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return (self.folder / "log").read_text()

    def stopped(self, wait: float) -> tuple[int, float, float]:
        """SIGTERM comes ``wait`` seconds after all ranks have begun.

        Returns:
            After how many steps of all jobs it stopped, and how many seconds after SIGTERM it had saved, and had ended.
        """
        until = time.monotonic() + PATIENCE
        while not all((self.folder / f"trains-{rank}").exists() for rank in range(self.size)):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < until, self.said
            time.sleep(0.01)
        time.sleep(wait)
        self.process.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        while "stopped by SIGTERM after step" not in self.said and self.process.poll() is None:
            assert time.monotonic() < asked + PATIENCE, self.said
            time.sleep(0.01)
        saved = time.monotonic() - asked
        assert self.process.wait(PATIENCE) == 0, self.said
        ended = time.monotonic() - asked
        assert self.said.count("stopped by SIGTERM after step") == 1, self.said
        step = int(self.said.partition("stopped by SIGTERM after step ")[2].partition(",")[0])
        whole = [found.name for found in whole_checkpoints(self.folder / "checkpoints")]
        assert f"step{step}_partial" in whole, self.said
        assert (self.folder / "checkpoints" / "newest").read_text().strip() == f"step{step}_partial"
        return step, saved, ended

    def losses(self) -> list[list[float]]:
        """Of all steps, with their learning rates, when it has ended by itself."""
        assert self.process.wait(PATIENCE) == 0, self.said
        return json.loads((self.folder / "losses.json").read_text())


@pytest.mark.full  # a stopped job of fit() that goes on is in test_train_gpt.py
@pytest.mark.timeout(300)
def test_a_job_that_was_stopped_goes_on(tmp_path):
    """Bit for bit: ``tests/preemption/test_auto_resume.py``, and all jobs below."""
    step, *_ = _Job(tmp_path / "stopped", "dp2").stopped(0.3)
    assert step > 0
    resumed = _Job(tmp_path / "stopped", "dp2", step + 5)
    losses = resumed.losses()
    assert f"begins after {step}\n" in resumed.said
    assert [rate for _, rate in losses] == pytest.approx([0.01 * 0.9 ** ((done + 1) // 7) for done in range(step + 5)])


@pytest.mark.full
def test_a_pipeline_stops_in_a_plain_loop(tmp_path):
    step, *_ = _Job(tmp_path / "job", "pp2", loop="range").stopped(0.2)
    assert step > 0


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("topology", "loop", "count"), [("pp2-dp2", "steps", 6), ("s4", "range", 6), ("tp2-dp2", "steps", 6)]
)
def test_stops_at_random_moments(tmp_path, topology, loop, count):
    """Each job goes on where the one before was stopped, and all together train as one that was never stopped."""
    moments = random.Random(topology)
    last = 0
    for _ in range(count):
        step, saved, ended = _Job(tmp_path / "stopped", topology, loop=loop).stopped(moments.uniform(0.0, 2.0))
        print(
            f"{topology}: stopped after step {step}, saved {saved:.1f} s and ended {ended:.1f} s after SIGTERM",
            flush=True,
        )
        assert step > last
        last = step
    together = _Job(tmp_path / "stopped", topology, last + 5, loop).losses()
    assert together == _Job(tmp_path / "undisturbed", topology, last + 5, loop).losses()
