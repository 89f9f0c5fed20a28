"""Who asks for the emulation, who turns it off, and what the log says."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import smp_emulation
from smp_config.machine import emulation
from smp_emulation import installing
from smp_emulation.covered import processes
from smp_launch.failures import fatal_errors
from smp_launch.machine.hosts import LAYOUT_VARIABLE, Layout, ScriptKind
from smp_launch.ranks import rank
from smp_launch.sagemaker import environment
from smp_launch.sagemaker.environment import EMULATION_LINE, emulates_cuda

ASKED = {emulation.VARIABLE: "1"}


@pytest.fixture
def gpus(monkeypatch):
    """``gpus(2)``: this machine has so many."""

    def there(number):
        monkeypatch.setattr(environment, "gpu_count", lambda environ: number)
        monkeypatch.setattr(environment, "has_unusual_gpu", lambda: False)

    there(0)
    return there


def test_only_where_it_is_asked_for_and_no_gpu_is_found(gpus):
    assert emulates_cuda(ASKED)
    assert not emulates_cuda({})
    assert not emulates_cuda({emulation.VARIABLE: "0"})
    gpus(1)
    assert not emulates_cuda(ASKED)


def test_a_word_that_means_nothing_is_refused_by_both_sides():
    from support.platform.jobs import model_parallel

    from smp_config import ConfigError
    from smp_estimator.settings.distribution import SettingsReader

    said = "SMP_EMULATE_CUDA is 'true'; it says whether calls of torch.cuda act on the CPU .*: set 1, or 0, or checked"
    wrong = {emulation.VARIABLE: "true"}
    with pytest.raises(ConfigError, match=said):
        emulates_cuda(wrong)
    with pytest.raises(ConfigError, match=said):
        SettingsReader().read(
            model_parallel(1, ddp=True),
            stock_image=False,
            instance_type="local",
            hosts=1,
            process_mode=True,
            environment=wrong,
        )


@pytest.mark.parametrize("number", [0, 2])
def test_a_rank_and_its_children_find_it(gpus, number, tmp_path, monkeypatch):
    gpus(number)
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    for name, content in (("resourceconfig", {"hosts": ["algo-1"]}), ("hyperparameters", {}), ("inputdataconfig", {})):
        (config / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.setattr(sys, "path", list(sys.path))
    layout = Layout(("algo-1",), 1, ScriptKind.SCRIPT)
    environ = {
        **ASKED,
        "SAGEMAKER_BASE_DIR": str(tmp_path),
        "CURRENT_HOST": "algo-1",
        LAYOUT_VARIABLE: layout.to_text(),
    }
    rank._prepare(layout, 0, environ)
    folder = str(Path(rank.__file__).parents[1] / "discovery_emulation")
    assert (folder in environ["PYTHONPATH"].split(os.pathsep)) == (folder in sys.path) == (number == 0)
    assert environ[emulation.VARIABLE] == ("0" if number else "1")


def test_pytorch_s_hook_asks_the_environment(monkeypatch):
    monkeypatch.delenv(emulation.VARIABLE, raising=False)
    installing.install_where_asked()
    assert not smp_emulation.is_active()
    monkeypatch.setenv(emulation.VARIABLE, "1")
    try:
        installing.install_where_asked()
        assert smp_emulation.is_active()
    finally:
        installing.uninstall()


def test_a_real_gpu_is_used(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert not installing.install()
    assert not smp_emulation.is_active()


@pytest.mark.parametrize(
    ("user", "inherited", "number", "found"),
    [
        ({}, None, 0, "1"),
        ({emulation.VARIABLE: "0"}, None, 0, "0"),
        ({}, "0", 0, "0"),
        ({}, None, 1, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, None, 0, "1"),
    ],
)
def test_process_mode_asks_for_it(gpus, user, inherited, number, found, monkeypatch, tmp_path):
    from smp_estimator.local.bootstrap import environment_of
    from smp_estimator.local.files.tree import JobTree

    gpus(number)
    monkeypatch.delenv(emulation.VARIABLE, raising=False)
    if inherited is not None:
        monkeypatch.setenv(emulation.VARIABLE, inherited)
    job = JobTree.at(tmp_path, 1)
    made = environment_of(job.hosts[0], job, job_name="a", token="b", region=None, user=user)
    assert made.get(emulation.VARIABLE) == found


@pytest.mark.parametrize(
    ("given", "instance_type", "inherited", "found"),
    [
        (None, "local", None, "1"),
        ({"A": "B"}, "local", None, "1"),
        ({emulation.VARIABLE: "0"}, "local", None, "0"),
        (None, "local", "0", "0"),
        (None, "local_gpu", None, None),
    ],
)
def test_docker_s_local_mode_asks_for_it(given, instance_type, inherited, found, monkeypatch):
    from smp_estimator.local.bootstrap import with_emulation

    monkeypatch.delenv(emulation.VARIABLE, raising=False)
    if inherited is not None:
        monkeypatch.setenv(emulation.VARIABLE, inherited)
    made = with_emulation(given, instance_type)
    assert made.get(emulation.VARIABLE) == found
    assert made.items() >= (given or {}).items()


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'apex'", name="apex"),
        ModuleNotFoundError("No module named 'flash_attn.layers'", name="flash_attn.layers"),
        ImportError("libcudart.so.12: cannot open shared object file: No such file or directory"),
        OSError("CUDA_HOME environment variable is not set. Please set it to your CUDA install root."),
        NotImplementedError("Could not run 'aten::empty' with arguments from the 'CUDA' backend. This could be"),
        RuntimeError("0 active drivers ([]). There should only be one."),
    ],
)
def test_an_error_of_cuda_code_is_explained(error, monkeypatch):
    monkeypatch.setenv(emulation.VARIABLE, "0")
    before = str(error)
    fatal_errors.explain(error)
    assert str(error) == before
    monkeypatch.setenv(emulation.VARIABLE, "1")
    fatal_errors.explain(error)
    assert str(error).startswith(f"{before}: this needs a GPU, or CUDA code; ")
    assert "SMP_EMULATE_CUDA=1" in str(error)
    assert str(error).endswith("run this part of the script on a machine with a GPU")


def test_a_device_that_is_a_bare_number_is_explained(monkeypatch):
    monkeypatch.setenv(emulation.VARIABLE, "1")
    with pytest.raises(RuntimeError) as raised:
        torch.device(0)
    fatal_errors.explain(raised.value)
    assert str(raised.value).endswith('write torch.device("cuda", 0), which means the same')


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'numppy'", name="numppy"), ValueError("boom")])
def test_other_errors_are_left_alone(error, monkeypatch):
    monkeypatch.setenv(emulation.VARIABLE, "1")
    before = str(error)
    fatal_errors.explain(error)
    assert str(error) == before


@pytest.mark.parametrize(
    ("named", "used"),
    [
        ("nccl", "gloo"),
        ("NCCL", "gloo"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo"),
        ("cuda:nccl", "gloo"),
        ("gloo", "gloo"),
        ("smddp", "smddp"),
        (None, None),
    ],
)
def test_the_backend_of_cpu_tensors(named, used):
    assert processes.backend_here(named) == used


def test_the_line_says_how_to_turn_it_off():
    assert EMULATION_LINE.startswith("no GPU here: calls of torch.cuda act on the CPU")
    assert '{"SMP_EMULATE_CUDA": "0"}' in EMULATION_LINE
