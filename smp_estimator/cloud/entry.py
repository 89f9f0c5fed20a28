"""Runs the user's script in a stock image, with the runtime that travelled beside it.

This file is uploaded with the user's code and started by the platform in every rank. It needs only Python. The runtime
lies beside it as a wheel, which is unpacked once per host and put first on Python's path. So a script never gets an
``smdistributed`` of the image.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import io
import json
import os
import re
import runpy
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

USER_PROGRAM = "sagemaker_smp_program"

#: Packages of the wheel; none of them may come from anywhere else.
PACKAGES = (
    "smdistributed",
    "smp_config",
    "smp_emulation",
    "smp_integrations",
    "smp_launch",
    "smp_records",
    "smp_runtime",
    "smp_tools",
    "smp_transformer_engine",
    "smp_version2",
    "torch_sagemaker",
)

#: The module that lets ``import torch.sagemaker`` find version 2 of the library.
FINDER = "torch_sagemaker_finder"

#: Written beside the packages: each Python that the script starts runs it, and so finds version 2.
_SITE_CUSTOMIZE = f"import {FINDER}\n\n{FINDER}.run_hidden(__file__)\n"

#: The oldest versions that the runtime supports.
_PYTHON_FLOOR = (3, 10)
TORCH_FLOOR = (2, 4)

#: The same for a job of the data parallel library: its backend needs newer collectives.
_DATA_PARALLEL_FLOOR = (2, 6)

#: Parameter of a job that switches the data parallel library on.
_DATA_PARALLEL = "sagemaker_distributed_dataparallel_enabled"

#: In the unpacked wheel: the entry point by which PyTorch registers the backend ``smddp`` when it is imported.
_DISCOVERY = os.path.join("smp_launch", "discovery")

#: The same for the emulation of CUDA, and the variable that asks for it.
_EMULATION = os.path.join("smp_launch", "discovery_emulation")
_EMULATE = "SMP_EMULATE_CUDA"

#: Of the wheel and of all that it holds; it has about two million, in some five hundred files.
_MOST_BYTES = 256 << 20
_MOST_FILES = 20_000

#: Port of the rendezvous unless the platform has set one.
_PORT = "7777"


class ImageError(RuntimeError):
    """An error for a job that cannot begin in its image; its message ends in its code.

    The code is written out because the table of all codes is not importable yet.
    """

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} [SMP206]")


def main() -> None:
    """Prepare this rank and run the script with the arguments of the command line."""
    code = os.path.dirname(os.path.abspath(__file__))
    data_parallel = bool(read_parameters().get(_DATA_PARALLEL))
    check_versions(_DATA_PARALLEL_FLOOR if data_parallel else TORCH_FLOOR)
    _check_requirements()
    site = unpack_wheel(wheel_in(code))
    prefer(site)
    os.environ.setdefault("SMP_HOST", host_name())
    if os.environ.get(_EMULATE, "0") != "0":
        emulate(site)
    if data_parallel:
        discover(os.path.join(site, _DISCOVERY))
        os.environ.update(rank_variables(os.environ))
        os.environ.setdefault("MASTER_ADDR", leading_host())
        os.environ.setdefault("MASTER_PORT", _PORT)
    program = os.path.join(code, user_program())
    if program.endswith(".sh"):
        sys.exit(subprocess.call(["bash", program, *sys.argv[1:]]))
    sys.argv[0] = program
    sys.path[:2] = [site, os.path.dirname(program)]
    runpy.run_path(program, run_name="__main__")


def discover(folder: str) -> None:
    """Let PyTorch find the entry points in ``folder`` when it is imported, here and in the script's own processes."""
    sys.path.append(folder)
    os.environ["PYTHONPATH"] += os.pathsep + folder


def emulate(site: str) -> None:
    """Have calls of ``torch.cuda`` act on the CPU, unless there is a GPU."""
    from smp_launch.sagemaker.environment import EMULATION_LINE, emulates_cuda

    if not emulates_cuda(os.environ):
        os.environ[_EMULATE] = "0"
        return
    discover(os.path.join(site, _EMULATION))
    if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
        print(f"[smp] {EMULATION_LINE}", flush=True)


def unpack_wheel(wheel: str) -> str:
    """Return the folder with the wheel's files, unpacking the wheel if no rank of the host has done so.

    The folder's name depends only on the user and on the wheel's content, so that all ranks of a host find it. If
    that name is taken by a folder that this user did not make or that others can write to, this rank uses a
    folder of its own.

    Raises:
        ImageError: the file is not a wheel of the runtime.
    """
    # Nonblocking, because opening a named pipe would wait for a writer before its kind can be checked.
    with open(os.open(wheel, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
            raise ImageError(
                f"{wheel} is no file of at most {_MOST_BYTES:,} bytes; the upload puts the runtime there: start the job again"
            )
        content = file.read()
    digest = hashlib.sha256(content).hexdigest()[:16]
    site = os.path.join(tempfile.gettempdir(), f"smp-site-{os.getuid()}-{digest}")
    if _is_ours(site):
        return site
    partial = tempfile.mkdtemp(prefix="smp-site-")
    try:
        _unpack(content, partial)
        with open(os.path.join(partial, "sitecustomize.py"), "w", encoding="utf-8") as file:
            file.write(_SITE_CUSTOMIZE)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ImageError(
            f"{wheel} cannot be unpacked: {error}; the upload puts the runtime there: start the job again, or see that the disk of "
            f"{tempfile.gettempdir()} has room"
        ) from error
    try:
        # The name appears when the folder is complete: ranks of the host unpack at the same time, and each may use it at once.
        os.rename(partial, site)
    except OSError:  # another rank was faster, or another user has the name
        if not _is_ours(site):
            return partial
        shutil.rmtree(partial, ignore_errors=True)
    return site


def _is_ours(folder: str) -> bool:
    """Return whether this is a folder, not a link, that this user owns and no other user can write to."""
    try:
        about = os.lstat(folder)
    except OSError:
        return False
    is_own_folder = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
    is_writable_by_others = bool(about.st_mode & 0o022)
    return is_own_folder and not is_writable_by_others


def _unpack(wheel: bytes, folder: str) -> None:
    """Unpack a wheel after checking its listed names and sizes; no file becomes larger than its listed size."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        _check_members(archive.infolist())
        archive.extractall(folder)


def _check_members(members: list[zipfile.ZipInfo]) -> None:
    names = {os.path.normpath(member.filename) for member in members}
    size = sum(member.file_size for member in members)
    # Of two files with one name only the second would stay, and a small archive may hold more than the disk.
    has_duplicates = len(names) < len(members)
    is_too_large = len(members) > _MOST_FILES or size > _MOST_BYTES
    if has_duplicates or is_too_large:
        raise ValueError(
            f"it holds {len(members):,} files of {len(names):,} names and {size:,} bytes; the runtime has each name once, "
            f"and at most {_MOST_FILES:,} files and {_MOST_BYTES:,} bytes"
        )
    for name in names:
        if not _is_inside(name):
            raise ValueError(f"it holds {name[:100]!r}, which lies outside its folder")


def _is_inside(name: str) -> bool:
    if os.path.isabs(name) or "\0" in name:
        return False
    return name.split(os.sep)[0] != os.pardir


def prefer(site: str) -> None:
    """Make this process and its children import the packages in ``site``; raise ImageError if others take precedence."""
    others = [path for path in sys.path if os.path.isdir(os.path.join(path or ".", "smdistributed"))]
    sys.path.insert(0, site)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{site}{os.pathsep}{before}" if before else site
    for name in list(sys.modules):
        if name.split(".")[0] in (*PACKAGES, FINDER):
            del sys.modules[name]
    # A finder of the image's own copy would answer first.
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "__module__", None) != FINDER]
    importlib.invalidate_caches()
    for name in (*PACKAGES, FINDER):
        _check_origin(name, site)
    importlib.import_module(FINDER)
    is_first_rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0"
    if others and is_first_rank:
        print(f"[smp] the smdistributed in {others[0]} is not used: the job brought its own", flush=True)


def _check_origin(name: str, site: str) -> None:
    """Raise ImageError unless a package would be imported from ``site``."""
    spec = importlib.util.find_spec(name)
    found = spec.origin if spec is not None else None
    if found is None or not os.path.abspath(found).startswith(site + os.sep):
        raise ImageError(
            f"the image's own {name} ({found}) hides the one that came with the job ({site}); an import hook of the "
            "image must be the cause: remove that package from the image, or use a stock image"
        )


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that scripts of the data parallel library read, from mpirun's variables.

    The result is empty on a host where mpirun started no ranks: one of an instance group that does not train.
    """
    names = {
        "RANK": "RANK",
        "WORLD_SIZE": "SIZE",
        "LOCAL_RANK": "LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "LOCAL_SIZE",
        "SMDATAPARALLEL_LOCAL_RANK": "LOCAL_RANK",
    }
    said = {name: environ.get(f"OMPI_COMM_WORLD_{word}") for name, word in names.items()}
    return {name: value for name, value in said.items() if value is not None}


def host_name() -> str:
    """Return this host's name; the platform's own variables hold the leader's name on every host."""
    return str(_resources().get("current_host") or socket.gethostname())


def leading_host() -> str:
    """Return the host of rank 0: the first host that trains."""
    resources = _resources()
    hosts = _training_hosts(resources) or resources.get("hosts") or ["127.0.0.1"]
    return str(hosts[0])


def _training_hosts(resources: dict[str, Any]) -> list[Any]:
    """Return the hosts of the instance group that trains, or none if the job has no such groups."""
    chosen = read_parameters().get("sagemaker_distribution_instance_groups") or ()
    for group in resources.get("instance_groups") or ():
        if not isinstance(group, dict):
            continue
        hosts = group.get("hosts")
        if hosts and group.get("instance_group_name") in chosen:
            return list(hosts)
    return []


def _resources() -> dict[str, Any]:
    """Return the platform's description of the job's hosts, or an empty mapping if there is none."""
    base = os.environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml"
    path = os.path.join(base, "input", "config", "resourceconfig.json")
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_parameters() -> dict[str, Any]:
    """Return the platform's parameters of the job; raise ImageError if they cannot be parsed."""
    text = os.environ.get("SM_FRAMEWORK_PARAMS") or "{}"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ImageError(
            f"SM_FRAMEWORK_PARAMS is no JSON ({error}); it has {len(text):,} characters, and the platform writes it from the job's "
            "hyperparameters: leave it as it is"
        ) from None
    return found if isinstance(found, dict) else {}


def user_program() -> str:
    """Return the user's script, relative to the code directory; raise ImageError if the job does not name one."""
    parameters = read_parameters()
    if USER_PROGRAM not in parameters:
        raise ImageError(
            f"the job does not say which script to run: {USER_PROGRAM} is missing in SM_FRAMEWORK_PARAMS, which has "
            f"{sorted(parameters)}; start the job with SMPEstimator.fit()"
        )
    return str(parameters[USER_PROGRAM])


def wheel_in(code: str) -> str:
    """Return the wheel of the runtime in this folder; raise ImageError unless there is exactly one."""
    found = sorted(glob.glob(os.path.join(code, "smp_estimator-*.whl")))
    if len(found) != 1:
        raise ImageError(
            f"{code} holds {len(found)} wheels of the runtime ({', '.join(map(os.path.basename, found))}); the upload puts one "
            "there: remove others from source_dir"
        )
    return found[0]


def check_versions(torch_floor: tuple[int, int]) -> None:
    """Raise ImageError if the image's Python or PyTorch is too old.

    Without this check, an import would fail later with an unclear message.
    """
    from importlib import metadata

    oldest = ".".join(map(str, torch_floor))
    library = "data parallel" if torch_floor == _DATA_PARALLEL_FLOOR else "model parallel"
    if sys.version_info < _PYTHON_FLOOR:
        floor = ".".join(map(str, _PYTHON_FLOOR))
        raise ImageError(
            f"the image has Python {sys.version.split()[0]}, and the {library} runtime needs {floor}; use an image with "
            f"PyTorch {oldest} or newer"
        )
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise ImageError(f"the image has no PyTorch; use a PyTorch training image, {oldest} or newer") from None
    if tuple(int(part) for part in re.findall(r"\d+", torch)[:2]) < torch_floor:
        raise ImageError(
            f"the image has PyTorch {torch}, and the {library} runtime needs {oldest} or newer; use a newer image"
        )


def _check_requirements() -> None:
    if importlib.util.find_spec("pydantic") is None:
        raise ImageError(
            "the image has no pydantic: requirements.txt, which the upload extends, was not installed; without a network "
            "(enable_network_isolation) use an image that has the runtime: give image_uri"
        )


if __name__ == "__main__":
    main()
