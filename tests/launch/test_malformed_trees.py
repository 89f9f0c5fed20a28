"""Trees of /opt/ml that no platform should write: the failure file names the file and the field; each was a traceback once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import smp_launch.__main__ as launcher_program
from smp_config.errors import ConfigError
from smp_launch.mpirun.command import check_size
from smp_launch.sagemaker.environment import seconds_of
from smp_launch.sagemaker.model_trainer import launcher_variables
from smp_launch.sagemaker.tree import BASE_VARIABLE

Change = Callable[[Any], None]


def _set(name: str, field: str, value: Any) -> Change:
    def change(job: Any) -> None:
        path = job.tree() / "input" / "config" / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))

    return change


def _resource(field: str, value: Any) -> Change:
    return _set("resourceconfig", field, value)


def _hyperparameter(field: str, value: Any) -> Change:
    return _set("hyperparameters", field, value)


def _file(name: str, content: bytes) -> Change:
    return lambda job: (job.tree() / "input" / "config" / f"{name}.json").write_bytes(content) and None


def _in_place(name: str, make: Callable[[Path], None]) -> Change:
    def change(job: Any) -> None:
        path = job.tree() / "input" / "config" / f"{name}.json"
        path.unlink()
        make(path)

    return change


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (_hyperparameter("sagemaker_instance_type", "5"), ["sagemaker_instance_type is 5, an int"]),
        (
            _hyperparameter("sagemaker_distribution_instance_groups", '"workers"'),
            ["instance_groups is 'workers', a str"],
        ),
        (_hyperparameter("sagemaker_distributed_dataparallel_enabled", '"yes"'), ["enabled is 'yes'"]),
        (
            _hyperparameter("sagemaker_mpi_num_of_processes_per_host", "1e30"),
            ["processes_per_host is 1e+30", "at most"],
        ),
        (
            _hyperparameter("sagemaker_mpi_num_of_processes_per_host", "200000"),
            ["200000 ranks", "no job has more than 131,072"],
        ),
        (_hyperparameter("sagemaker_program", '"../../other.py"'), ["'../../other.py' lies outside the code folder"]),
        (_hyperparameter("sagemaker_program", json.dumps("x" * 300 + ".py")), ["does not exist"]),
        (_hyperparameter("a=b", "1"), ["a hyperparameter called 'a=b' (3 characters)"]),
        (_hyperparameter("n", '"\\u0000"'), ["hyperparameters.json", "['n'] holds the character NUL"]),
        (_hyperparameter("n", '"\\ud800"'), ["['n'] holds half of a surrogate pair"]),
        (_hyperparameter("n", "x" * 200_000), ["cannot be started", "takes 200,001 bytes of at most 131,072"]),
        (_hyperparameter("mp_parameters", '{"ddp": true, "ddp": false}'), ["mp_parameters", "'ddp' stands twice"]),
        (_resource("current_instance_type", 5), ["resourceconfig.json has current_instance_type=5, an int"]),
        (_resource("network_interface_name", ["lo"]), ["network_interface_name=['lo'], a list"]),
        (_resource("network_interface_name", "x" * 300), ["network_interface_name=", "no interface is called that"]),
        (_resource("instance_groups", 5), ["instance_groups=5, an int"]),
        (_resource("instance_groups", [5]), ["the group at 0 is an int"]),
        (_resource("instance_groups", [{"instance_group_name": ["a"]}]), ["instance_group_name=['a']"]),
        (_resource("instance_groups", [{"instance_group_name": "a", "hosts": 3}]), ["the group 'a' has hosts=3"]),
        (_resource("hosts", ["algo-1", "algo-1"]), ["2 names of which 1 differ"]),
        (_resource("hosts", ["algo-1", "../x"]), ["has the host '../x' (4 characters)"]),
        (_resource("hosts", ["algo-1", "x" * 300]), ["(300 characters)"]),
        (_set("inputdataconfig", "../outside", {}), ["a channel called '../outside'"]),
        (_set("inputdataconfig", "x" * 300, {}), ["a channel called 'xxx"]),
        (_set("inputdataconfig", "train", 5), ["has 5, an int, for the channel 'train'"]),
        (_file("resourceconfig", b"[" * 5000), ["resourceconfig.json is not JSON", "more than 64 levels"]),
        (_file("resourceconfig", b'{"n": ' + b"9" * 5000 + b"}"), ["resourceconfig.json is not JSON", "4300 digits"]),
        (_file("hyperparameters", b'{"a": "1", "a": "2"}'), ["hyperparameters.json", "'a' stands twice"]),
        (_file("hyperparameters", b" " * (9 << 20)), ["has 9,437,184 bytes", "at most 8,388,608"]),
        (_in_place("hyperparameters", os.mkfifo), ["hyperparameters.json cannot be read (it is not a file)"]),
        (_in_place("hyperparameters", lambda path: path.symlink_to("/dev/zero")), ["it is not a file"]),
        (_in_place("hyperparameters", Path.mkdir), ["hyperparameters.json cannot be read"]),
    ],
)
def test_the_file_and_the_field_are_named(
    launcher: Any, monkeypatch: pytest.MonkeyPatch, change: Change, parts: list[str]
) -> None:
    job = launcher.job("")
    change(job)
    monkeypatch.setattr(
        "smp_launch.supervision.supervise.Supervisor.run", lambda *_: pytest.fail("a process was started")
    )
    environ = {BASE_VARIABLE: str(job.tree()), "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    assert launcher_program.run(None, environ) == 2  # type: ignore[arg-type]
    said = job.failure()
    assert said.startswith("the job cannot start: ")
    assert all(part in said for part in parts), said


@pytest.mark.parametrize(
    ("variable", "text", "part"),
    [
        ("SMP_LAUNCH_HYPERPARAMETERS", "[" * 5000, "no JSON object"),
        ("SMP_LAUNCH_HYPERPARAMETERS", "[]", "no JSON object"),
        ("SMP_SCRIPT_ARGUMENTS", "{", "no JSON list"),
        ("SMP_SCRIPT_ARGUMENTS", "[1]", "write each as text"),
        ("CURRENT_HOST", "x" * 3000, "not among the hosts"),
    ],
)
def test_the_variable_is_named(launcher: Any, variable: str, text: str, part: str) -> None:
    job = launcher.job("")
    environ = {BASE_VARIABLE: str(job.tree()), "PATH": os.environ["PATH"], "HOME": os.environ["HOME"], variable: text}
    assert launcher_program.run(None, environ) == 2  # type: ignore[arg-type]
    assert variable in job.failure()
    assert part in job.failure()


@pytest.mark.parametrize(
    ("change", "config", "part"),
    [
        (_resource("current_instance_type", 5), "{}", "current_instance_type=5, an int"),
        (_resource("current_instance_type", None), "[" * 5000, "no JSON object"),
        (_resource("current_instance_type", None), '{"parameters": {"ddp": true, "ddp": true}}', "no JSON object"),
    ],
)
def test_a_job_of_model_trainer(launcher: Any, change: Change, config: str, part: str) -> None:
    job = launcher.job("")
    change(job)
    with pytest.raises(ConfigError, match=part):
        launcher_variables({BASE_VARIABLE: str(job.tree()), "SM_DISTRIBUTED_CONFIG": config})


def test_a_full_disk_under_the_launcher_is_named(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    job = launcher.job("")
    monkeypatch.setattr("tempfile.mkdtemp", full)
    environ = {BASE_VARIABLE: str(job.tree()), "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    assert launcher_program.run(None, environ) == 2  # type: ignore[arg-type]
    assert "the job cannot go on: " in job.failure()
    assert "the disk is full (" in job.failure()


def test_secrets_do_not_appear_in_the_first_line(launcher: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    job = launcher.job("", hyperparameters={"hub_token": "s3cr3t-thing", "lr": 0.5})
    seen: list[list[str]] = []
    monkeypatch.setattr(
        "smp_launch.supervision.supervise.Supervisor.run", lambda _, command, *__: seen.append(command) or 1 / 0
    )
    environ = {BASE_VARIABLE: str(job.tree()), "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    assert launcher_program.run(None, environ) == 1  # type: ignore[arg-type]
    said = capfd.readouterr()
    assert "--hub_token *** --lr 0.5" in said.out + said.err
    assert "s3cr3t" not in said.out + said.err
    assert "s3cr3t-thing" in seen[0], "the script gets it as before"


def test_sizes_of_a_command_line() -> None:
    check_size(["mpirun", "x" * 131_071], {"A": "b"})
    with pytest.raises(
        ConfigError, match=r"mpirun cannot be started: the word 'xxx.* takes 131,073 bytes of at most 131,072"
    ):
        check_size(["mpirun", "x" * 131_072], {})
    with pytest.raises(ConfigError, match="the variable LONG takes"):
        check_size(["mpirun"], {"LONG": "x" * 131_072})
    with pytest.raises(ConfigError, match="all words and variables take"):
        check_size(["mpirun", *["x" * 100_000] * (os.sysconf("SC_ARG_MAX") // 100_000 + 1)], {})


@pytest.mark.parametrize("text", ["nan", "inf", "1e18", "soon"])
def test_a_grace_that_no_clock_can_be_told_is_the_default(text: str) -> None:
    assert seconds_of({"X": text}, "X", 7.0) == 7.0
