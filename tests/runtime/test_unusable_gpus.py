"""A host with GPUs that PyTorch cannot use: an error, not a training on the CPU that nobody asked for."""

from __future__ import annotations

import pytest
import torch

import smp_emulation
from smp_config.machine import device_files
from smp_launch.sagemaker.environment import gpu_count
from smp_runtime.comm import devices
from smp_runtime.errors import SMPUserError


@pytest.fixture
def host(monkeypatch, tmp_path):
    """``host(2)``: makes this a host with so many GPUs, beside the other files of the driver."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    own = device_files.nvidia_devices

    def with_gpus(count):
        for name in (*(f"nvidia{number}" for number in range(count)), "nvidiactl", "nvidia-uvm", "nvidia0x"):
            (tmp_path / name).touch()
        monkeypatch.setattr(device_files, "nvidia_devices", lambda: own(tmp_path))
        return tmp_path

    return with_gpus


def test_files_are_counted_by_number(host):
    folder = host(11)
    assert device_files.nvidia_devices() == [str(folder / f"nvidia{number}") for number in range(11)]
    many = ",".join("0" * 20)
    expected = {"": 0, "-1": 0, "3": 1, "0,1": 2, "0, 1 ,": 2, many: 11}
    assert {visible: gpu_count({"CUDA_VISIBLE_DEVICES": visible}) for visible in expected} == expected
    assert gpu_count({}) == 11


def test_a_build_without_cuda_is_named(host, solo, monkeypatch):
    folder = host(2)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SMPUserError) as raised:
        solo({})
    said = str(raised.value)
    assert f"this host has 2 GPUs ({folder}/nvidia0 …), but PyTorch {torch.__version__} is a build without CUDA" in said
    assert "set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU" in said


def test_the_reason_of_the_driver_is_repeated(host, monkeypatch):
    host(1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def refuse():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nPlease update")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(
        SMPUserError, match=r"1 GPU \(.*nvidia0\).*CUDA 13.0 and cannot start it \(The NVIDIA driver .* 12020\).\)"
    ):
        devices.refuse_unusable_gpus({})


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_leave_the_job_on_the_cpu(host, solo, monkeypatch, visible):
    host(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert solo({}).ranks.device == torch.device("cpu")


def test_other_hosts_are_as_before(host, monkeypatch):
    host(0)
    devices.refuse_unusable_gpus({})
    host(2)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        devices.refuse_unusable_gpus({})
    with monkeypatch.context() as patch:
        patch.setattr(smp_emulation, "is_active", lambda: True)
        devices.refuse_unusable_gpus({})
    with pytest.raises(SMPUserError):
        devices.refuse_unusable_gpus({})
