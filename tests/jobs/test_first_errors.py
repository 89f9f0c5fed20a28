"""The twelve commonest mistakes of a new user: each is reported once, with its code, its place, and what to type."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.platform.command_line import call

pytest.importorskip("mpi4py")

PIPELINE = '{"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": true}'

TRAINING = """
import os
import torch
from torch import nn
from torch.nn.functional import cross_entropy
import smdistributed.modelparallel.torch as smp

smp.init()
torch.manual_seed(0)
model = smp.DistributedModel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))


@smp.step
def train_step(model, inputs, targets):
    loss = cross_entropy(model(inputs), targets)
    model.backward(loss)
    return loss


inputs, targets = torch.randn(16, 8), torch.zeros(16, dtype=torch.long)
for step in range(2):
    optimizer.zero_grad()
    loss = train_step(model, inputs.to(smp.state.device), targets.to(smp.state.device))
    optimizer.step()
smp.save_checkpoint(os.environ["SMP_CHECKPOINT_DIR"], tag="trained")
"""


def training(before: str = "", after: str = "") -> str:
    """The script above, with one piece of it in another form."""
    assert TRAINING.count(before) == 1 or not before
    return TRAINING.replace(before, after) if before else TRAINING


def failure_of(output: str) -> list[str]:
    """The lines from the one that begins with ``Error:`` on; nothing else of the output is about the failure."""
    before, error, after = output.partition("Error: ")
    assert error, output
    assert "Traceback" not in output
    assert "smp-launch: failed" not in output
    assert not re.search(r"^\[rank\d\]|the same \w+$|PMIX", before, re.MULTILINE), output
    return after.splitlines()


def check(output: str, code: str, reason: str, place: str = "") -> None:
    """Check that the output has the reason once, in its one line with a code, and at most six lines about it."""
    lines = failure_of(output)
    assert len(lines) <= 6, lines
    assert output.count(reason) == 1, output
    assert reason in lines[0]
    assert lines[0].endswith(f"[{code}]"), lines[0]
    assert any(line.strip().startswith(f"at train.py:{place}") for line in lines) or not place
    log = re.search(r"^The whole log is in (\S+)$", output, re.MULTILINE)
    assert log is None or Path(log[1]).is_file()


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """``run(script, *options, code=1)``: the output of ``smp-estimator run`` with two processes."""

    def start(script: str, *options: str, code: int = 1, parameters: str = PIPELINE) -> str:
        path = tmp_path / "train.py"
        path.write_text(script)
        words = ["run", str(path), "--processes", "2", "--parameters", parameters]
        return call(*words, "--checkpoints", str(tmp_path / "saved"), *options, code=code).output

    return start


def _notes(error: BaseException) -> list[str]:
    """Return the lines that Python prints below an error, such as its code."""
    return list(getattr(error, "__notes__", ()))


@pytest.fixture
def fit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """``fit(script)``: the output of ``SMPEstimator.fit()``, with the message of its exception behind ``Error:``."""
    pytest.importorskip("sagemaker.estimator", reason="version 2 of the SDK")
    from sagemaker.exceptions import UnexpectedStatusException

    from smp_estimator import ConfigError, SMPEstimator

    def start(script: str, channels: Any = None, parameters: str = '{"ddp": true}', **environment: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(script)
        distribution = {
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": json.loads(parameters)}},
            "mpi": {"enabled": True, "processes_per_host": 2},
        }
        with pytest.raises((UnexpectedStatusException, ConfigError)) as raised:
            SMPEstimator(
                entry_point=str(path), instance_type="local", environment=environment, distribution=distribution
            ).fit(channels)
        shown = capfd.readouterr()
        codes = re.findall(r" \[SMP\d+\]", f" {' '.join(_notes(raised.value))}")
        return f"{shown.out}{shown.err}\nError: {str(raised.value).removeprefix('Error for ')}{''.join(codes)}"

    return start


# -- before a process starts ---------------------------------------------------------------------------------


def test_a_misspelt_parameter(run: Any) -> None:
    said = run("", parameters='{"pipeline_paralel_degree": 2}')
    check(said, "SMP101", "unknown parameter 'pipeline_paralel_degree', did you mean 'pipeline_parallel_degree'?")


def test_degrees_that_do_not_fit_the_processes(run: Any) -> None:
    said = run("", parameters='{"pipeline_parallel_degree": 3, "ddp": true}')
    check(said, "SMP102", "set --processes to 3")


def test_a_channel_without_a_folder(run: Any) -> None:
    check(run("", "--channel", "train=/nowhere"), "SMP108", "--channel train is '/nowhere', which is no directory")


def test_a_script_that_needs_ranks_started_by_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(training("smp.init()", f"smp.init({PIPELINE.replace('true', 'True')})"))
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.count("start it with: smp-launch run --processes 2 train.py") == 1
    assert "[SMP102]" in done.stderr or sys.version_info < (3, 11)
    assert done.stderr.count('  File "') <= 3, "the script's line, and smp.init"


# -- jobs of scripts without PyTorch, which start fast -------------------------------------------------------

NO_CHANNEL = "import os\n\nos.environ['SM_CHANNEL_TRAIN']\n"
NO_FILE = "open('data/tokens.bin')\n"
NO_PACKAGE = "import not_installed_here\n"


@pytest.mark.job
@pytest.mark.parametrize(
    ("script", "reason", "place"),
    [
        (NO_CHANNEL, "--channel train=FOLDER of smp-estimator run", "3, in <module>: os.environ"),
        (NO_FILE, "a relative path begins at the job's copy of the script's folder", "1, in <module>: open("),
        (NO_PACKAGE, "-m pip install not_installed_here", "1, in <module>: import"),
    ],
    ids=["channel", "file", "package"],
)
def test_something_that_the_job_lacks(run: Any, script: str, reason: str, place: str) -> None:
    said = run(script, parameters='{"ddp": true}')
    check(said, "SMP319", reason, place)
    assert "smp-estimator explain SMP319" in said


@pytest.mark.job
def test_a_file_that_a_channel_lacks(run: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokens.bin").touch()
    script = "import os\nopen(os.environ['SM_CHANNEL_TRAIN'] + '/token.bin')\n"
    said = run(script, "--channel", f"train={tmp_path / 'data'}", parameters='{"ddp": true}')
    check(said, "SMP319", "channel 'train' holds tokens.bin", "2, in <module>")


@pytest.mark.job
@pytest.mark.parametrize(
    ("script", "reason", "place"),
    [
        (NO_CHANNEL, "fit({'train': 'file:///folder'})", "3, in <module>: os.environ"),
        pytest.param(NO_FILE, "a relative path begins at", "1, in <module>: open(", marks=pytest.mark.full),
        pytest.param(NO_PACKAGE, "-m pip install not_installed_here", "1, in <module>", marks=pytest.mark.full),
    ],
    ids=["channel", "file", "package"],
)
def test_fit_reports_a_failure_once(fit: Any, script: str, reason: str, place: str) -> None:
    check(fit(script), "SMP319", reason, place)


@pytest.mark.parametrize(
    ("channels", "parameters", "code", "reason"),
    [
        (None, '{"pipeline_paralel_degree": 2}', "SMP101", "did you mean 'pipeline_parallel_degree'?"),
        (None, '{"pipeline_parallel_degree": 3, "ddp": true}', "SMP102", "set processes_per_host to 3"),
        ({"train": "file:///nowhere"}, '{"ddp": true}', "SMP114", "/nowhere, which does not exist"),
    ],
    ids=["misspelt", "degrees", "folder"],
)
def test_fit_refuses_before_a_process_starts(fit: Any, channels: Any, parameters: str, code: str, reason: str) -> None:
    said = fit("", channels, parameters)
    lines = failure_of(said)
    assert len(lines) <= 6
    assert reason in lines[0]
    assert said.count(f"[{code}]") == 1


@pytest.mark.job
def test_every_rank_prints(run: Any) -> None:
    assert run("print('a line of each rank')\n", code=0, parameters='{"ddp": true}').count("a line of each rank\n") == 2


@pytest.mark.job
def test_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('it runs', flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "smp_estimator.cli", "run", "train.py", "--processes", "2"]
    job = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        assert job.stdout is not None
        assert any("it runs" in line for line in job.stdout)
        os.killpg(job.pid, signal.SIGINT)
        rest = job.communicate(timeout=60)[0].splitlines()
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 130
    told = [line for line in rest if line.strip() and line != "it runs"]
    assert len(told) <= 6, told
    assert sum("Ctrl-C: stopping job" in line for line in told) == 1
    assert sum("The job was stopped. Its log: " in line for line in told) == 1


# -- jobs that train -----------------------------------------------------------------------------------------

STEP = "    loss = train_step(model, inputs.to(smp.state.device), targets.to(smp.state.device))\n    optimizer.step()\n"
LATE = training("    model.backward(loss)\n").replace("optimizer.step()\n", "loss.reduce_mean().backward()\n", 1)
SAVE = 'smp.save_checkpoint(os.environ["SMP_CHECKPOINT_DIR"], tag="trained")\n'


@pytest.mark.job
def test_backward_outside_the_step(run: Any) -> None:
    check(run(LATE), "SMP302", "call model.backward(loss) in that function", "24, in <module>: loss.reduce_mean()")


@pytest.mark.full
@pytest.mark.parametrize(
    "script",
    [training("model.backward(loss)", "loss.backward()"), training("inputs.to(smp.state.device)", "inputs.cuda()")],
    ids=["loss.backward() in the step", "a CUDA call without a GPU"],
)
def test_what_is_no_mistake_here(run: Any, script: str) -> None:
    said = run(script, code=0)
    assert "Error" not in said


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "environment", "code", "reason"),
    [
        (LATE, {}, "SMP302", "call model.backward(loss) in that function"),
        (training("inputs.to(", "inputs[:15].to("), {}, "SMP302", "use a batch of 12 or 16 samples"),
        (
            training("inputs.to(smp.state.device)", "inputs.cuda()"),
            {"SMP_EMULATE_CUDA": "0"},
            "SMP601",
            "instead of .cuda()",
        ),
        (training(SAVE, f"if smp.rank() == 0:\n    {SAVE}"), {}, "SMP502", "while rank 0 waits in smp.save_checkpoint"),
    ],
    ids=["backward", "batch", "no CUDA", "saved on one rank"],
)
def test_fit_reports_mistakes_of_a_training_script(
    fit: Any, tmp_path: Path, script: str, environment: dict[str, str], code: str, reason: str
) -> None:
    script = script.replace('os.environ["SMP_CHECKPOINT_DIR"]', repr(str(tmp_path / "saved")))
    check(fit(script, parameters=PIPELINE, **environment), code, reason)


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "options", "code", "reason"),
    [
        (training("inputs.to(", "inputs[:15].to("), (), "SMP302", "use a batch of 12 or 16 samples"),
        (training("inputs.to(", "inputs[:3].to("), (), "SMP302", "use a batch of 4 or more samples"),
        (
            training("inputs.to(smp.state.device)", "inputs.cuda()"),
            ("--env", "SMP_EMULATE_CUDA=0"),
            "SMP601",
            "write .to(smp.state.device) instead of .cuda()",
        ),
        (training(SAVE, f"if smp.rank() == 0:\n    {SAVE}"), (), "SMP502", "while rank 0 waits in smp.save_checkpoint"),
        (
            training(SAVE, f"if smp.rank() == 0:\n    model.state_dict()\n{SAVE}"),
            (),
            "SMP311",
            "rank 0 has called DistributedModel.state_dict (train.py:27), but rank 1 smp.save_checkpoint",
        ),
        (
            training(STEP, f"{STEP}    if smp.rank() == 0:\n        {SAVE}"),
            ("--env", "SMP_HANG_SECONDS=5"),
            "SMP501",
            "make the same calls on every rank",
        ),
    ],
    ids=[
        "batch",
        "small batch",
        "no CUDA",
        "saved on one rank",
        "gathered on one rank",
        "saved on one rank between steps",
    ],
)
def test_mistakes_of_a_training_script(run: Any, script: str, options: tuple[str, ...], code: str, reason: str) -> None:
    check(run(script, *options), code, reason)
