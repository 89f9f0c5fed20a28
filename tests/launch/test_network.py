"""Defaults for the network between hosts, and the warning about small shared memory."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from smp_launch.machine.network import network_defaults, shared_memory_warning, usable_interface

MIB = 2**20


@pytest.mark.parametrize(
    ("instance_type", "wanted"),
    [
        ("local", {}),
        ("ml.unheard.of", {}),
        ("ml.g5.xlarge", {}),
        ("ml.p3dn.24xlarge", {"FI_PROVIDER": "efa", "RDMAV_FORK_SAFE": "1"}),
        ("ml.p4d.24xlarge", {"FI_PROVIDER": "efa", "RDMAV_FORK_SAFE": "1", "FI_EFA_USE_DEVICE_RDMA": "1"}),
    ],
)
def test_defaults_by_instance(tmp_path, instance_type, wanted):
    (tmp_path / "efa_0").mkdir()
    assert network_defaults(instance_type, "eth0", 2, tmp_path) == {"NCCL_SOCKET_IFNAME": "eth0", **wanted}
    assert network_defaults(instance_type, "eth0", 1, tmp_path) == {}


def test_an_adapter_that_is_not_passed_on_is_not_used(tmp_path):
    for devices in (tmp_path, tmp_path / "missing"):
        assert network_defaults("ml.p4d.24xlarge", "eth0", 2, devices) == {"NCCL_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize(("mib", "warns"), [(64, True), (255, True), (256, False)])
def test_small_shared_memory(monkeypatch, mib, warns):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=mib * 256, f_frsize=4096))
    said = shared_memory_warning(2)
    assert (said is not None) == warns
    if said:
        assert f"holds {mib} MiB for 2 rank(s)" in said
        assert "--shm-size=1g" in said


def test_no_shared_memory_at_all(tmp_path):
    assert shared_memory_warning(2, tmp_path / "missing") is None


def test_an_interface_that_is_missing_matters_only_between_machines(tmp_path):
    (tmp_path / "eth0").mkdir()
    assert usable_interface("eth0", True, tmp_path) == "eth0"
    assert usable_interface("eth1", True, tmp_path) == "lo"
    assert usable_interface("eth1", False, tmp_path, tmp_path / "no routes") == "eth1"
    assert usable_interface("eth1", True, tmp_path / "missing") == "eth1"


def test_between_machines_the_default_route_stands_in_for_a_missing_interface(tmp_path):
    (tmp_path / "eth0").mkdir()
    routes = tmp_path / "route"
    routes.write_text("Iface\tDestination\tGateway\neth1\t0012A8C0\t0\neth0\t00000000\t0112A8C0\n")
    assert usable_interface("ethwe", False, tmp_path, routes) == "eth0"
    assert usable_interface("ethwe", True, tmp_path, routes) == "lo"
    assert usable_interface("eth0", False, tmp_path, tmp_path / "no routes") == "eth0"


def test_loopback_is_called_as_the_system_calls_it(monkeypatch, tmp_path):
    monkeypatch.setattr("smp_launch.machine.network.LOOPBACK", "lo0")
    assert usable_interface("lo", True, tmp_path / "missing") == "lo0"
    assert usable_interface("eth0", False, tmp_path / "missing") == "eth0"
