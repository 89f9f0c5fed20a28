"""5,000 hostile trees of /opt/ml: the launcher comes to a command line that means what stands there, or names file and field."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.faults import hostile

import smp_launch.__main__ as launcher
from smp_config.errors import ConfigError
from smp_config.job import decoded_hyperparameter
from smp_launch.errors import LaunchError
from smp_launch.mpirun.command import OpenMpi, PrivateDirs, check_size, mpirun_command
from smp_launch.sagemaker.tree import BASE_VARIABLE

if TYPE_CHECKING:
    from smp_launch.mpirun.job import Job

SEED = 21
COUNT = 5000
SAMPLE = 400

_FILES = ("hyperparameters", "resourceconfig", "inputdataconfig")

#: What may lie in the place of one of the files.
_CONTENTS = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe\x00",
    b"\xef\xbb\xbf{}",
    b'{"a": "\xff"}',
    b"[" * 100_000,
    b'{"a":' * 3000 + b"1" + b"}" * 3000,
    b'{"hosts": ["algo-1"], "hosts": ["algo-2"]}',
    b'{"n": ' + b"9" * 5000 + b"}",
    b'{"n": 1e999}',
    b'{"n": "\\ud800"}',
    b'{"n": "\\u0000"}',
    b" " * (9 << 20),
)


def _described() -> dict[str, Any]:
    """A job that is in order, by file."""
    parameters = {"ddp": True, "partitions": 1, "pipeline_parallel_degree": 1}
    values = {
        "sagemaker_program": "train.py",
        "sagemaker_submit_directory": "/opt/ml/code",
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 2,
        "sagemaker_mpi_custom_mpi_options": "-x NCCL_DEBUG=INFO",
        "sagemaker_instance_type": "ml.p4d.24xlarge",
        "sagemaker_distribution_instance_groups": ["workers"],
        "mp_parameters": parameters,
        "steps": 3,
        "name": "tiny",
    }
    group = {"instance_group_name": "workers", "instance_type": "ml.p4d.24xlarge", "hosts": ["algo-1"]}
    return {
        "hyperparameters": {name: json.dumps(value) for name, value in values.items()},
        "resourceconfig": {
            "current_host": "algo-1",
            "current_instance_type": "ml.p4d.24xlarge",
            "current_group_name": "workers",
            "hosts": ["algo-1"],
            "instance_groups": [group],
            "network_interface_name": "eth0",
        },
        "inputdataconfig": {"train": {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}},
    }


def spoilt(source: random.Random) -> tuple[dict[str, Any], dict[str, str]]:
    """The files of a job, values or raw bytes or a kind of file, and the launcher's environment."""
    files = _described()
    environ: dict[str, str] = {}
    for _ in range(source.choice((0, 1, 1, 1, 2))):
        way = source.randrange(20)
        name = source.choice((*_FILES, "hyperparameters", "resourceconfig"))
        if way == 0:
            files[name] = source.choice(_CONTENTS if source.random() < 0.9 else ("fifo", "folder", "zero", "missing"))
        elif way == 1:
            files[name] = json.dumps(_described()[name]).encode()[: source.randrange(200)]
        elif way <= 4:
            variable = source.choice(
                ["SMP_LAUNCH_HYPERPARAMETERS", "SMP_SCRIPT_ARGUMENTS", "CURRENT_HOST", "SMP_LAUNCH_GRACE_SECONDS"]
                + [
                    "SMP_TIMEOUT_SECONDS",
                    "SMDDP_AG_SORT_BUFFER_SIZE_BYTES",
                    "SM_HP_X",
                    "TRAINING_JOB_NAME",
                    "SMP_EMULATE_CUDA",
                ]
            )
            text = source.choice(
                (*hostile.TEXTS, '["a", 1]', '["--more", "b c"]', '{"sagemaker_program": "other.py", "more": 1}')
            )
            # The system itself lets no other text into an environment.
            if "\0" not in text and "\ud800" not in text:
                environ[variable] = text
        elif way <= 12 and name == "hyperparameters" and isinstance(files[name], dict) and files[name]:
            # The platform's values are texts, mostly of JSON: the value inside is what goes wrong.
            key = source.choice(list(files[name]))
            inside = decoded_hyperparameter(files[name][key])
            inside = (
                hostile.mutated(source, inside, json_only=True)
                if source.random() < 0.5
                else hostile.value(source, json_only=True)
            )
            files[name][key] = inside if isinstance(inside, str) and source.random() < 0.5 else json.dumps(inside)
        elif isinstance(files[name], dict):
            files[name] = hostile.mutated(source, files[name], json_only=True)
    return files, environ


def write(files: dict[str, Any], config: Path) -> None:
    """Put them where the platform does."""
    for path in config.iterdir():
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    for name, content in files.items():
        path = config / f"{name}.json"
        if content == "fifo":
            os.mkfifo(path)
        elif content == "folder":
            path.mkdir()
        elif content == "zero":
            path.symlink_to("/dev/zero")
        elif content != "missing":
            path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def as_far_as_the_command_line(job: Job, environ: dict[str, str], files: dict[str, Any]) -> None:
    """All that the launcher does before it starts a process, and whether the words are those of the files."""
    assert job.describe()
    program = job.program()
    command = program if job.mpi is None else mpirun_command(job.mpi, job.layout, job.options(PrivateDirs()), program)
    passed = job.environment(environ, {"SMP_LAUNCH_LAYOUT": job.layout.to_text()})
    check_size(command, passed)
    variables = job.training.variables()
    for text in (*command, *variables, *variables.values(), *passed.values()):
        assert "\0" not in os.fsdecode(os.fsencode(text))
    assert not any("=" in name for name in variables)
    assert command[-len(program) :] == program, "nothing stands behind the program"
    words = program[program.index("--") + 1 :]
    if not isinstance(files["hyperparameters"], dict) or "SMP_LAUNCH_HYPERPARAMETERS" in environ:
        return
    for name, text in files["hyperparameters"].items():
        if (
            isinstance(text, str)
            and not name.startswith("sagemaker_")
            and isinstance(decoded_hyperparameter(text), str)
        ):
            at = next(at for at, word in enumerate(words) if word == ("--" if len(name) > 1 else "-") + name)
            assert words[at + 1] == decoded_hyperparameter(text)


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, SAMPLE), *[pytest.param(n, 1000, marks=pytest.mark.full) for n in range(0, COUNT, 1000)]],
)
@pytest.mark.timeout(900)
def test_hostile_trees(
    first: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "algo-1" / "opt" / "ml"
    config = base / "input" / "config"
    for folder in (config, base / "input/data/train", base / "code", base / "model", base / "output"):
        folder.mkdir(parents=True)
    for script in ("train.py", "other.py"):
        (base / "code" / script).write_text("")
    (tmp_path / "secret.py").write_text("")
    monkeypatch.setattr(OpenMpi, "find", lambda environ: OpenMpi(Path("/usr/bin/mpirun"), 5, 0))
    monkeypatch.setattr(launcher, "prepare_code", lambda *_: None)
    for way in ("wait_for_leader", "serve_leader"):
        monkeypatch.setattr(launcher, way, lambda *_: (0, None))
    files: dict[str, Any] = {}

    def run_job(job: Job, stop: Any, environ: dict[str, str]) -> tuple[int, None]:
        as_far_as_the_command_line(job, environ, files)
        return 0, None

    monkeypatch.setattr(launcher, "run_job", run_job)
    monkeypatch.setattr(launcher, "run_over_hosts", run_job)
    # run() has a handler for what the launcher itself does wrong; here that must be seen.
    monkeypatch.setattr(launcher, "_itself", _raised)
    tally = hostile.Tally((ConfigError, LaunchError))
    for number in range(first, first + count):
        changed, environ = spoilt(random.Random(f"{SEED}-{number}"))
        files.clear()
        files.update(changed)
        write(files, config)
        (base / "output" / "failure").unlink(missing_ok=True)

        def case(environ: dict[str, str] = environ) -> None:
            code = launcher.run(None, {**environ, BASE_VARIABLE: str(base), "PATH": os.environ["PATH"]})  # type: ignore[arg-type]
            if code:
                raise ConfigError((base / "output" / "failure").read_text())

        tally.judge((number, changed, environ), case)
    with capsys.disabled():
        if count > SAMPLE:
            print(f"\ntrees {first} to {first + count - 1}: {tally}")
    assert not tally.wrong, str(tally)
    assert {path.name for path in tmp_path.iterdir()} == {"algo-1", "secret.py"}
    assert {path.name for path in base.rglob("*")} <= {
        *("input", "config", "data", "train", "code", "train.py", "other.py", "model", "output", "failure"),
        *(f"{name}.json" for name in _FILES),
    }
    assert tally.counts["accepted"] > count / 20
    assert tally.counts["refused"] > count / 4


def _raised(error: Exception) -> Any:
    raise error
