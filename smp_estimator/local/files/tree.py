"""The folders of a job: one ``/opt/ml`` per simulated host, filled as the platform fills it; and copies of folders."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_launch.sagemaker.tree import DEFAULT_BASE, Tree

if TYPE_CHECKING:
    from smp_estimator.local.files.channels import Channel

logger = logging.getLogger(__name__)

#: Path of a script's checkpoints inside a container.
CHECKPOINTS_IN_CONTAINER = "/opt/ml/checkpoints"


#: Folders of the platform with paths that scripts hard-code, and the variable that names the job's own folder.
_FOLDERS = {"checkpoints": "SMP_CHECKPOINT_DIR", "model": "SM_MODEL_DIR", "output": "SM_OUTPUT_DATA_DIR"}


def written_on_the_machine(since: float, base: Path = Path(DEFAULT_BASE)) -> dict[Path, str]:
    """Return this machine's own platform folders that were written after ``since``, in seconds of the clock.

    A job of host processes writes there only if its script has the path hard-coded. The result maps each folder
    to the variable that names the job's own folder.
    """
    found = {}
    for name, variable in _FOLDERS.items():
        folder = base / name
        with contextlib.suppress(OSError):
            paths = (folder, *folder.iterdir())
            is_written = any(path.stat().st_mtime >= since for path in paths)
            if is_written:
                found[folder] = variable
    return found


@dataclass(frozen=True)
class HostTree(Tree):
    """One host's ``/opt/ml``."""

    host: str

    @property
    def checkpoints(self) -> Path:
        """Return ``/opt/ml/checkpoints``: a folder of the host's own, or a link to one that outlives the job."""
        return self.base / "checkpoints"


@dataclass(frozen=True)
class JobTree:
    """``JOB_ROOT``: the hosts' trees, the code that they share, the log, and what is kept at the end."""

    root: Path
    hosts: tuple[HostTree, ...]

    @classmethod
    def at(cls, root: Path, host_count: int) -> JobTree:
        """Return the tree of ``algo-1`` … ``algo-N`` below ``root``; nothing is written yet."""
        names = [f"algo-{n}" for n in range(1, host_count + 1)]
        return cls(root, tuple(HostTree(root / name / "opt" / "ml", name) for name in names))

    @property
    def host_names(self) -> list[str]:
        """Return ``algo-1`` … ``algo-N``."""
        return [tree.host for tree in self.hosts]

    @property
    def log(self) -> Path:
        """Return the file with the hosts' output, without its records."""
        return self.root / "job.log"

    @property
    def code(self) -> Path:
        """Return the folder of the user's files; every host's ``code`` is a link to it."""
        return self.root / "code"

    @property
    def artifacts(self) -> Path:
        """Return the folder for the model if the estimator has no ``output_path``."""
        return self.root / "output"

    @property
    def status(self) -> Path:
        """Return the folder where the leader's bootstrap leaves its exit status for the other hosts."""
        return self.root / "status"

    @property
    def downloads(self) -> Path:
        """Return the folder with the S3 channels' contents at the job's start; the hosts share it."""
        return self.root / "downloads"

    def build(
        self,
        *,
        hyperparameters: Mapping[str, str],
        channels: Sequence[Channel],
        instance_type: str,
        checkpoints: Path | None,
        session: Any,
    ) -> None:
        """Write every host's folders and configuration files; :attr:`code` must be there already.

        Args:
            hyperparameters: values as the platform writes them, each a string.
            checkpoints: directory that every host's ``checkpoints`` is a link to; None gives each host its own folder.
            session: gives the S3 access of the SDK, for channels that must be downloaded.
        """
        self.status.mkdir(parents=True, exist_ok=True)
        if checkpoints is not None:
            checkpoints.mkdir(parents=True, exist_ok=True)
        for number, tree in enumerate(self.hosts):
            config, data = tree.config_dir, tree.data_dir
            for folder in (config, data, tree.model_dir, tree.output_data_dir, tree.intermediate_dir):
                folder.mkdir(parents=True)
            tree.code_dir.symlink_to(self.code, target_is_directory=True)
            if checkpoints is None:
                tree.checkpoints.mkdir()
            else:
                tree.checkpoints.symlink_to(checkpoints, target_is_directory=True)
            for channel in channels:
                channel.link(data, self.downloads, session, number, len(self.hosts))
            own = {**hyperparameters, "sagemaker_submit_directory": json.dumps(str(tree.code_dir))}
            _write(config / "hyperparameters.json", own)
            _write(config / "inputdataconfig.json", {channel.name: channel.config for channel in channels})
            _write(config / "resourceconfig.json", self._resources(tree.host, instance_type))

    def remove_workspace(self) -> None:
        """Remove the files that only the running job needed; the log and the artifacts stay."""
        for tree in self.hosts:
            shutil.rmtree(self.root / tree.host, ignore_errors=True)
        shutil.rmtree(self.code, ignore_errors=True)
        shutil.rmtree(self.status, ignore_errors=True)
        shutil.rmtree(self.downloads, ignore_errors=True)

    def _resources(self, host: str, instance_type: str) -> dict[str, Any]:
        group = "homogeneousCluster"
        return {
            "current_host": host,
            "current_instance_type": instance_type,
            "current_group_name": group,
            "hosts": self.host_names,
            "instance_groups": [
                {"instance_group_name": group, "instance_type": instance_type, "hosts": self.host_names}
            ],
            "network_interface_name": "lo",
        }


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8", opener=only_for_us) as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")


def only_for_us(path: str, flags: int) -> int:
    """Open a file with permissions for its owner only; an ``opener`` for ``open``."""
    return os.open(path, flags, 0o600)


def copy_folder(source: Path, target: Path, leave_out: Callable[[Path], bool] = lambda _: False) -> None:
    """Copy a directory with the targets of its links, except paths that :func:`is_left_out` or ``leave_out`` selects.

    Raises:
        shutil.Error: files that cannot be read or written, as a list of (from, to, reason).
    """

    def ignore(directory: str, names: list[str]) -> set[str]:
        around = _around(Path(directory), source)
        paths = (Path(directory, name) for name in names)
        return {path.name for path in paths if leave_out(path) or _is_odd(path, around)}

    shutil.copytree(source, target, ignore=ignore, dirs_exist_ok=True)


def is_left_out(path: Path) -> bool:
    """Return whether a path cannot be copied; log a warning if so.

    Such paths are links to nothing, and links back to a folder around them, because such a copy would never end.
    So are pipes, sockets and devices, which are neither files nor directories.
    """
    return _is_odd(path, _around(path.parent, path.parent))


def _is_odd(path: Path, around: set[str]) -> bool:
    if not path.exists():
        logger.warning("the link %s points to nothing and is left out", path)
    elif not path.is_file() and not path.is_dir():
        logger.warning("%s is neither a file nor a directory and is left out", path)
    elif path.is_symlink() and path.is_dir() and os.path.realpath(path) in around:
        logger.warning("the link %s leads back to %s, which holds it, and is left out", path, os.path.realpath(path))
    else:
        return False
    return True


def _around(directory: Path, top: Path) -> set[str]:
    """Return every folder around ``directory``, both along the path from ``top`` and along its resolved links."""
    way = [directory, *(parent for parent in directory.parents if parent.is_relative_to(top))]
    around: set[str] = set()
    for folder in way:
        real = Path(os.path.realpath(folder))
        around.update(map(str, (real, *real.parents)))
    return around
