"""Stock images on this machine: a Python that has what a row of the table has, and jobs started in it as the platform does.

What pip installs in it comes from wheels that are made of this environment's own packages, so that no index is asked.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[3]

#: The day of the tests' jobs, on which the images up to 2.9 are no longer patched.
DAY = date(2026, 11, 23)

#: What the toolkit of the images sets, to which an installation's own words are added.
_OF_THE_JOB = ("SM", "OMPI_", "PMIX_", "PYTHON", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")

#: A script of the model parallel library, which tells what each rank found.
STEP = """
import json, os, sys
import torch
import smdistributed.modelparallel.torch as smp

smp.init()
model = smp.DistributedModel(torch.nn.Linear(4, 2))

@smp.step
def step(x):
    loss = model(x).mean()
    model.backward(loss)
    return loss

loss = step(torch.ones(4, 4)).reduce_mean()
found = smp.allgather([smp.rank(), smp.local_rank(), smp.__file__, sys.argv[1:]], smp.WORLD)
if smp.rank() == 0:
    print("found " + json.dumps(found), flush=True)
"""


#: A script of the data parallel library: no import of this project, the image's PyTorch finds the backend.
DATA_PARALLEL_STEP = """
import json, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("smddp")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.full((3, 4), float(dist.get_rank()))).sum().backward()
everyone = [None] * dist.get_world_size()
import smdistributed.dataparallel.torch.distributed as older
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE SMDATAPARALLEL_LOCAL_RANK MASTER_ADDR SMP_HOST".split()
dist.all_gather_object(everyone, [
    dist.get_rank(), older.get_local_rank(), older.__file__, sys.argv[1:], dist.get_backend(),
    float(model.module.weight.grad[0, 0]), [os.environ[name] for name in names],
])
if dist.get_rank() == 0:
    print("found " + json.dumps(everyone), flush=True)
dist.destroy_process_group()
"""


def fix_day(patch: pytest.MonkeyPatch) -> None:
    """Jobs of tests are of :data:`DAY`, whatever day it is."""
    patch.setattr("smp_estimator.cloud.images.today", lambda: DAY)


def unpacked(boto: Any, request: Mapping[str, Any], folder: Path) -> Path:
    """The uploaded source of a CreateTrainingJob request, as the platform unpacks it into a new folder."""
    bucket, key = json.loads(request["HyperParameters"]["sagemaker_submit_directory"])[5:].split("/", 1)
    folder.mkdir()
    boto.client("s3").download_file(bucket, key, str(folder.parent / "sourcedir.tar.gz"))
    with tarfile.open(folder.parent / "sourcedir.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder


# -- what an image has ---------------------------------------------------------------------------------------


class ImagePython:
    """A Python of its own with PyTorch and NumPy, and what else the image has of that which matters; nothing more but pip.

    Args:
        folder: for it, made anew.
        mpi4py: whether the image has it.
        smddp: whether the image has AWS's own data parallel library, here one that nobody may import.
        site: ``site-packages`` that PyTorch is taken from; this environment's by default.
    """

    def __init__(self, folder: Path, *, mpi4py: bool, smddp: bool = False, site: Path | None = None) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.program = folder / "bin" / "python"
        self.site = next((folder / "lib").glob("python*/site-packages"))
        for name in closure(["torch", "numpy", "pip", *(["mpi4py"] if mpi4py else [])], site):
            _link(metadata_of(name, site), self.site)
        if smddp:
            (self.site / "smdistributed").mkdir()
            (self.site / "smdistributed" / "__init__.py").write_text("raise RuntimeError('the image has another one')")

    def has(self, module: str) -> str | None:
        """Where a module comes from; None where there is none."""
        code = f"import importlib.util as u; s = u.find_spec({module!r}); print(s.origin if s else '')"
        done = subprocess.run(
            [self.program, "-c", code], env=_outside(), capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip() or None

    def install_requirements(self, code: Path, wheels: Path) -> None:
        """What the toolkit does with the job's code on every host before ranks start, with ``wheels`` for the index."""
        command = [self.program, "-m", "pip", "install", "-r", "requirements.txt"]
        environment = {**_outside(), **offline(wheels)}
        done = subprocess.run(
            command, cwd=code, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def _link(installed: metadata.Distribution, site: Path) -> None:
    """Have the files of an installed package in ``site``, its metadata too."""
    for entry in {Path(str(file)).parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
        source = Path(str(installed.locate_file(entry)))
        if source.exists() and not (site / entry).exists():
            (site / entry).symlink_to(source)


def metadata_of(name: str, site: Path | None = None) -> metadata.Distribution:
    """What is known of an installed package."""
    if site is None:
        return metadata.distribution(name)
    return next(iter(metadata.distributions(name=name, path=[str(site)])))


def closure(names: Iterable[str], site: Path | None = None) -> list[str]:
    """These packages and all that they need."""
    found: dict[str, None] = {}
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found[name] = None
        for needed in map(Requirement, metadata_of(name, site).requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(needed.name)
    return list(found)


# -- the package index ---------------------------------------------------------------------------------------


def make_wheels(names: Iterable[str], folder: Path) -> Path:
    """Wheels of installed packages and of all that they need, in a new folder."""
    folder.mkdir()
    for name in closure(names):
        _make_wheel(metadata_of(name), folder)
    return folder


def _make_wheel(installed: metadata.Distribution, folder: Path) -> None:
    tag = next(
        line.split(": ")[1] for line in (installed.read_text("WHEEL") or "").splitlines() if line.startswith("Tag:")
    )
    name = f"{installed.metadata['Name'].replace('-', '_')}-{installed.version}"
    kept = [file for file in installed.files or () if ".." not in file.parts and file.suffix != ".pyc"]
    record = next(file for file in kept if file.name == "RECORD")
    lines = []
    with zipfile.ZipFile(folder / f"{name}-{tag}.whl", "w") as archive:
        for file in kept:
            if file.name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
                continue
            content = file.locate().read_bytes()
            archive.writestr(str(file), content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{file},sha256={digest},{len(content)}")
        archive.writestr(str(record), "\n".join([*lines, f"{record},,", ""]))


def offline(wheels: Path) -> dict[str, str]:
    """Variables with which pip takes a folder of wheels for the index, and images' Open MPI is found."""
    return {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_NO_CACHE_DIR": "1",
        "PIP_NO_COMPILE": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "LD_LIBRARY_PATH": str(Path(sys.prefix) / "lib"),
    }


# -- the toolkit ---------------------------------------------------------------------------------------------


def started_by_toolkit(
    code: Path, words: Sequence[str], program: Path | str = sys.executable, ranks: int = 2, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``mpirun … python -m mpi4py smp_entry.py …``, the toolkit's command for a job with ``sagemaker_mpi_enabled``."""
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    options = ["--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    return subprocess.run(
        [mpirun, *options, str(program), "-m", "mpi4py", "_smp_entry.py", *words],
        cwd=code,
        env={**_outside(), **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def found_by_ranks(done: subprocess.CompletedProcess[str]) -> list[Any]:
    """What rank 0 printed behind ``found``."""
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("found "))
    return list(json.loads(line.removeprefix("found ")))


def _outside() -> dict[str, str]:
    """This process's environment without what a job has; the images' Open MPI is found by LD_LIBRARY_PATH."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_JOB)}
    return {
        **kept,
        "LD_LIBRARY_PATH": str(Path(sys.prefix) / "lib"),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }


@lru_cache(maxsize=1)
def torch_sites() -> dict[str, Path]:
    """By first two numbers of its version, ``site-packages`` of this checkout's environments with another PyTorch.

    Those of ``make test-torch`` for this very Python; an image's job runs with its own PyTorch where one has it.
    """
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    found = {}
    for site in sorted(ROOT.glob(f".venv-torch-*/lib/{python}/site-packages")):
        found[".".join(metadata_of("torch", site).version.split(".")[:2])] = site
    return found
