"""The instance catalogue against three other tables: botocore's enum, the SDK's, and moto's copy of EC2's."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from smp_config.machine.instances import GIB, MIB, instance, instances


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name} is not installed")
    return Path(spec.submodule_search_locations[0])


def _json(folder: Path, stem: str) -> Any:
    for path in (folder / stem, folder / f"{stem}.gz"):
        if path.is_file():
            raw = path.read_bytes()
            return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    pytest.skip(f"{folder} has no {stem}")


@cache
def _training_types() -> list[str]:
    (service,) = (_package("botocore") / "data" / "sagemaker").iterdir()
    return _json(service, "service-2.json")["shapes"]["TrainingInstanceType"]["enum"]


@cache
def _ec2() -> dict[str, Any]:
    return _json(_package("moto") / "ec2" / "resources", "instance_types.json")


def test_every_gpu_training_type_of_the_service_is_known() -> None:
    gpu_types = {name for name in _training_types() if name.startswith(("ml.p", "ml.g"))}
    assert len(gpu_types) > 50
    assert gpu_types - {known.name for known in instances()} == set()


def test_the_catalogue_has_no_type_that_the_service_lacks() -> None:
    assert {known.name for known in instances()} - set(_training_types()) == set()


@pytest.mark.parametrize("known", instances(), ids=lambda known: known.name)
def test_agrees_with_the_table_of_ec2(known: Any) -> None:
    row = _ec2().get(known.name.removeprefix("ml."))
    if row is None:
        pytest.skip("EC2's table lacks it")
    (gpu,) = row["GpuInfo"]["Gpus"]
    network = row["NetworkInfo"]
    assert (known.gpus, known.gpu) == (gpu["Count"], gpu["Name"])
    assert known.gpu_memory_bytes == gpu["MemoryInfo"]["SizeInMiB"] * MIB
    assert known.efa == network["EfaSupported"]
    assert known.host_memory_bytes == row["MemoryInfo"]["SizeInMiB"] * MIB
    found = re.search(r"(?:(\d+)x )?(\d+) Gigabit", network["NetworkPerformance"])
    assert found is not None
    assert known.network_gbps == int(found[1] or 1) * int(found[2])
    assert known.network_burst == network["NetworkPerformance"].startswith("Up to")


def test_agrees_with_the_table_of_the_sdk() -> None:
    table = _json(_package("sagemaker") / "image_uri_config", "instance_gpu_info.json")
    compared = 0
    for rows in table.values():
        for name, row in rows.items():
            known = instance(name)
            if known is None:
                continue
            compared += 1
            assert known.gpus == row["Count"], name
            # The SDK rounds the 22,888 MiB of an A10G up to 24 GiB on some sizes.
            assert known.gpu_memory_bytes * known.gpus == pytest.approx(row["TotalGpuMemoryInMiB"] * MIB, rel=0.07), (
                name
            )
    assert compared > 20


@pytest.mark.parametrize(
    ("name", "gpus", "gpu", "gib", "gbps", "efa", "rdma", "nvlink"),
    [
        ("ml.p2.16xlarge", 16, "K80", 12, 25, False, False, False),
        ("ml.p3.2xlarge", 1, "V100", 16, 10, False, False, False),
        ("ml.p3.16xlarge", 8, "V100", 16, 25, False, False, True),
        ("ml.p3dn.24xlarge", 8, "V100", 32, 100, True, False, True),
        ("ml.p4d.24xlarge", 8, "A100", 40, 400, True, True, True),
        ("ml.p4de.24xlarge", 8, "A100", 80, 400, True, True, True),
        ("ml.p5.48xlarge", 8, "H100", 80, 3200, True, True, True),
        ("ml.g4dn.12xlarge", 4, "T4", 16, 50, True, False, False),
        ("ml.g5.48xlarge", 8, "A10G", 22.35, 100, True, False, False),
        ("ml.g6e.48xlarge", 8, "L40S", 44.7, 400, True, False, False),
    ],
)
def test_published_facts(
    name: str, gpus: int, gpu: str, gib: float, gbps: float, efa: bool, rdma: bool, nvlink: bool
) -> None:
    known = instance(name)
    assert known is not None
    assert (known.gpus, known.gpu, known.network_gbps) == (gpus, gpu, gbps)
    assert (known.efa, known.rdma, known.nvlink) == (efa, rdma, nvlink)
    assert known.gpu_memory_bytes == pytest.approx(gib * GIB, rel=0.001)


def test_what_cannot_be_true_is_not_there() -> None:
    for known in instances():
        assert known.gpus in (1, 2, 4, 8, 16), known
        assert 8 * GIB < known.gpu_memory_bytes < 400 * GIB, known
        assert not known.rdma or known.efa, known
        assert not known.nvlink or known.gpus > 1, known
        assert not (known.efa and known.network_burst), known


def test_names_and_unknown_types() -> None:
    assert instance("p4d.24xlarge") is instance("ml.p4d.24xlarge")
    assert instance("ml.p9.96xlarge") is None
    assert instance("local") is None
    known = instance("ml.p4d.24xlarge")
    assert known is not None
    assert known.network_gbps == 400
    unpublished = instance("ml.p2.xlarge")
    assert unpublished is not None
    assert unpublished.network_gbps is None
