"""``smp-estimator verify --plain``: it names 19 faults in scripts of DDP, FSDP2 and plain ranks, and none in 9 right scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.matrix import sampled
from support.platform.command_line import call, flat

from smp_config import ConfigError
from smp_estimator.numerics.plain_verification import compare_plain
from smp_estimator.numerics.report import write_verdict
from smp_estimator.numerics.script_run import run_recorded
from smp_launch.machine.processes import all_processes

_SCRIPTS = Path(__file__).parents[1] / "support" / "scripts"
_PLAIN = _SCRIPTS / "plain"

#: By script, what the verdict must name.
FAULTS = {
    "accumulation_scale": ("2 backward passes of update 0 add up to 2 times the gradient of their mean loss",),
    "broken_tie": ("tied weight broken: embed.weight and head.weight",),
    "broken_tie_on_meta": ("tied weight broken: embed.weight and head.weight",),
    "buffers_not_synced": ("step 1: buffer of norm.running_", "set broadcast_buffers=True"),
    "clip_before_reduce": ("step 0, rank(s) 0, 1: gradient of ", "clipped their gradients by different norms"),
    "different_seeds": ("step 0: weight of ", "the ranks began with different weights"),
    "divided_by_ranks": ("step 0, rank(s) 0, 1: loss", "the loss of a rank is 1/2 of that of one process"),
    "frozen_on_one_rank": ("step 0: update of mlp.2.", "is in no optimizer on rank(s) 1 only"),
    "get_batch_loss_scale": ("step 0, rank(s) 0, 1: loss", "the loss of a rank is 1/2 of that of one process"),
    "get_batch_same_seed": ("step 0, rank(s) 0, 1: input of the model", "the replicas [0, 1] have read the same batch"),
    "local_norms": ("step 0, rank(s) 0, 1: gradient of ", "clipped by the norm of the rank's own part"),
    "mean_over_unequal_tokens": ("step 0, rank(s) 0, 1: loss", "a mean over tokens that are not ignored"),
    "no_all_reduce": ("step 0: gradient of ", "each rank updates with its own gradients"),
    "no_gradient_sync": ("step 0: gradient of ", "each rank updates with its own gradients"),
    "no_sampler": ("step 0, rank(s) 0, 1: input of the model", "the replicas [0, 1] have read the same batch"),
    "optimizer_before_sharding": ("no parameter of the model has changed", "the optimizer has other tensors"),
    "scaled_learning_rate": ("step 0, rank(s) 0, 1: update of ", "0.02 on the ranks and 0.01 in one process"),
    "scheduler_per_rank": ("step 1, rank(s) 0, 1: update of ", "0.0025 on the ranks and 0.005 in one process"),
    "set_epoch": ("same order in each epoch: DistributedSampler of loader 1",),
}
RIGHT = (
    "ddp",
    "ddp_accumulation",
    "ddp_clip",
    "fsdp2",
    "fsdp2_accumulation",
    "fsdp2_mixed_precision",
    "plain_ranks",
    "evaluation",
    "get_batch",
)


def test_every_script_is_tried() -> None:
    found = {path.stem for path in _PLAIN.glob("*.py")} - {"common"}
    assert found == {f"fault_{name}" for name in FAULTS} | {f"right_{name}" for name in RIGHT}


@pytest.fixture(scope="module")
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the records of all scripts that are tried, made by forks of one process."""
    folder = tmp_path_factory.mktemp("plain") / "records"
    wanted = [
        item.callspec.params["script"]
        for item in request.session.items
        if item.path == request.path and "records" in getattr(item, "fixturenames", ())
    ]
    scripts = [str(_PLAIN / f"{name}.py") for name in dict.fromkeys(wanted)]
    command = [sys.executable, str(_SCRIPTS / "plain_forks.py"), str(folder), *scripts]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "SMP_EMULATE_CUDA": "0",
        "TORCHDYNAMO_DISABLE": "1",
    }
    subprocess.run(command, env=environment, check=True, timeout=1000)
    return folder


def _verdict(records: Path, script: str) -> list[str]:
    logs = "\n".join(path.read_text() for path in sorted((records / script).glob("*.log")))
    try:
        found = compare_plain(records / script)
    except ConfigError as error:
        raise AssertionError(logs) from error
    assert {each.step for each in found.compared} == {0, 1, 2, 3}, logs
    assert found.is_equal == script.startswith("right"), write_verdict(found)
    return write_verdict(found)


@pytest.mark.timeout(1100)
@pytest.mark.parametrize(
    "script",
    sampled(
        [f"fault_{name}" for name in FAULTS],
        [
            "fault_set_epoch",
            "fault_get_batch_same_seed",
            "fault_accumulation_scale",
            "fault_local_norms",
            "fault_frozen_on_one_rank",
        ],
    ),
)
def test_a_fault_is_named(records: Path, script: str) -> None:
    said = " ".join(_verdict(records, script))
    for text in FAULTS[script.removeprefix("fault_")]:
        assert text in said


@pytest.mark.timeout(1100)
@pytest.mark.parametrize(
    "script",
    sampled(
        [f"right_{name}" for name in RIGHT],
        ["right_ddp", "right_get_batch", "right_ddp_accumulation", "right_fsdp2_mixed_precision"],
    ),
)
def test_no_fault_is_named_in_a_right_script(records: Path, script: str) -> None:
    assert [sentence.partition(":")[0] for sentence in _verdict(records, script)] == ["equal within rounding"]


@pytest.mark.job
@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = (_PLAIN / "right_fsdp2.py").read_text()
    script.write_text(text + "\nimport torch, pathlib\ntorch.save({}, pathlib.Path(__file__).with_name('saved.pt'))\n")
    (tmp_path / "common.py").write_text((_PLAIN / "common.py").read_text())
    said = flat(call("verify", "--plain", str(script), "--steps", "2", "--folder", str(tmp_path / "kept")))
    assert "2 ranks, then one process, 2 updates each" in said
    assert "equal within rounding" in said
    assert not (tmp_path / "saved.pt").exists()
    assert (tmp_path / "kept" / "ranks.log").exists()


@pytest.mark.job
@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_script_without_a_loader(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(9):\n"
        "    model(torch.randn(2, 4)).mean().backward()\n"
        "    optimizer.step()\n"
    )
    assert "has read no batch from a torch.utils.data.DataLoader" in flat(
        call("verify", "--plain", str(script), code=1)
    )


def test_a_function_that_the_script_lacks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def get_batch():\n    return None\n")
    said = flat(call("verify", "--plain", str(script), "--batches", "get_batches", code=1))
    assert "defines no function 'get_batches', did you mean 'get_batch'?" in said
    said = flat(call("verify", str(script), "--parameters", "{}", "--batches", "get_batch", code=1))
    assert "leave --batches out" in said


def test_a_script_is_plain_or_has_parameters(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    for words in ((), ("--plain", "--parameters", "{}")):
        assert "either --parameters" in flat(call("verify", str(script), *words, code=1))


def test_a_run_ends_at_its_deadline(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo it waits; exec sleep 600"]
    with pytest.raises(ConfigError, match=r"was ended after 2 seconds[\s\S]*it waits"):
        run_recorded("slow", command, tmp_path / "record", dict(os.environ), timeout=2.0)


@pytest.mark.parametrize(
    ("end", "timeout", "said"),
    [("exit 3", None, "exit code 3"), ("trap 'exit 0' TERM; wait", 2.0, "ended after 2 seconds")],
    ids=["ended", "late"],
)
def test_no_process_of_a_run_outlives_it(tmp_path: Path, end: str, timeout: float | None, said: str) -> None:
    command = ["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; {end}"]
    with pytest.raises(ConfigError, match=said):
        run_recorded("leaving", command, tmp_path / "record", dict(os.environ), timeout=timeout)
    left = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30.0
    while any(process.pid == left and not process.ended for process in all_processes()):
        assert time.monotonic() < deadline, "the run's own process still runs"
        time.sleep(0.01)
