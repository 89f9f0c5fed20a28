"""The folders of a job: one ``/opt/ml`` per simulated host, filled as the platform fills it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_launch.tree import Tree

if TYPE_CHECKING:
    from smp_estimator.local.channels import Channel

#: Where a script finds its checkpoints inside a container.
CHECKPOINTS_IN_CONTAINER = "/opt/ml/checkpoints"


@dataclass(frozen=True)
class HostTree(Tree):
    """What one host of a job sees as ``/opt/ml``."""

    host: str

    @property
    def checkpoints(self) -> Path:
        """``/opt/ml/checkpoints``: a folder of the host's own, or a link to one that outlives the job."""
        return self.base / "checkpoints"


@dataclass(frozen=True)
class JobTree:
    """``JOB_ROOT``: the hosts' trees, the code that they share, the log, and what is kept at the end."""

    root: Path
    hosts: tuple[HostTree, ...]

    @classmethod
    def at(cls, root: Path, host_count: int) -> JobTree:
        """The tree of ``algo-1`` … ``algo-N`` below ``root``; nothing is written yet."""
        names = [f"algo-{n}" for n in range(1, host_count + 1)]
        return cls(root, tuple(HostTree(root / name / "opt" / "ml", name) for name in names))

    @property
    def host_names(self) -> list[str]:
        """``algo-1`` … ``algo-N``."""
        return [tree.host for tree in self.hosts]

    @property
    def log(self) -> Path:
        """What the hosts wrote, without lines of progress."""
        return self.root / "job.log"

    @property
    def code(self) -> Path:
        """The user's files; every host's ``code`` is a link to it."""
        return self.root / "code"

    @property
    def artifacts(self) -> Path:
        """Where the model goes when the estimator was given no ``output_path``."""
        return self.root / "output"

    @property
    def status(self) -> Path:
        """Where the leader's bootstrap tells the others how it ended."""
        return self.root / "status"

    @property
    def downloads(self) -> Path:
        """What channels from S3 held when the job began; the hosts share it."""
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
            channels: linked into every host's ``input/data``.
            checkpoints: directory that every host's ``checkpoints`` is a link to; None gives each host its own folder.
            session: gives the S3 access of the SDK, for channels that must be downloaded.
        """
        self.status.mkdir(parents=True, exist_ok=True)
        if checkpoints is not None:
            checkpoints.mkdir(parents=True, exist_ok=True)
        for tree in self.hosts:
            config, data = tree.config_dir, tree.data_dir
            for folder in (config, data, tree.model_dir, tree.output_data_dir, tree.intermediate_dir):
                folder.mkdir(parents=True)
            tree.code_dir.symlink_to(self.code, target_is_directory=True)
            if checkpoints is None:
                tree.checkpoints.mkdir()
            else:
                tree.checkpoints.symlink_to(checkpoints, target_is_directory=True)
            for channel in channels:
                channel.link(data, self.downloads, session)
            own = {**hyperparameters, "sagemaker_submit_directory": json.dumps(str(tree.code_dir))}
            _write(config / "hyperparameters.json", own)
            _write(config / "inputdataconfig.json", {channel.name: channel.config for channel in channels})
            _write(config / "resourceconfig.json", self._resources(tree.host, instance_type))

    def remove_workspace(self) -> None:
        """Remove what only the running job needed; the log and the artifacts stay."""
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
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
