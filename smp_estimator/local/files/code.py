"""The script of a job and the files beside it: ``/opt/ml/code``."""

from __future__ import annotations

import fnmatch
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp_config import ConfigError
from smp_config.machine.disk_space import why_full
from smp_estimator.local.files.archives import unpack
from smp_estimator.local.files.tree import copy_folder
from smp_estimator.local.files.uris import bucket_and_key, is_s3_uri

#: Folders that are no code of the job.
_NEVER_SHIPPED = ("__pycache__", ".git", ".ipynb_checkpoints")


@dataclass(frozen=True)
class CodeSource:
    """The code that the estimator ships, with the cloud's meaning of its three arguments.

    With ``source_dir`` the whole directory is shipped. Without it only the entry point is shipped, not its
    neighbors. Each of ``dependencies`` becomes a folder (or file) of its own name next to the script. Files and
    folders of ``source_dir`` are not shipped if their names match one of ``ignore_patterns`` (``"*.bin"``).
    """

    entry_point: str
    source_dir: str | None = None
    dependencies: tuple[str, ...] = ()
    ignore_patterns: tuple[str, ...] = ()

    @property
    def uri(self) -> str:
        """Return the value of the hyperparameter ``sagemaker_submit_directory``."""
        if is_s3_uri(self.source_dir):
            return str(self.source_dir)
        directory = self.source_dir if self.source_dir else os.path.dirname(self.entry_point)
        return f"file://{Path(directory).expanduser().absolute()}"

    @property
    def program(self) -> str:
        """Return the value of ``sagemaker_program``: the script's path relative to the code directory."""
        return self.entry_point if self.source_dir else os.path.basename(self.entry_point)

    def copy_to(self, target: Path, session: Any) -> None:
        """Fill ``target``, so that the job keeps running the code that it was started with.

        Args:
            target: a directory that does not exist yet, directly inside the job's root.

        Raises:
            ConfigError: naming a file that cannot be copied.
        """
        if is_s3_uri(self.source_dir):
            target.mkdir(parents=True)
            _unpack(str(self.source_dir), target, session)
        elif self.source_dir:
            _copy(Path(self.source_dir).expanduser(), target, target.parent, self.ignore_patterns)
        else:
            target.mkdir(parents=True)
            shutil.copy2(Path(self.entry_point).expanduser(), target / self.program)
        for dependency in self.dependencies:
            path = Path(dependency).expanduser().absolute()
            if path.is_dir():
                _copy(path, target / path.name, target.parent)
            else:
                shutil.copy2(path, target / path.name)


def _copy(source: Path, target: Path, job_root: Path, ignored: tuple[str, ...] = ()) -> None:
    """Copy a directory; leave out the folder of the jobs if it lies inside."""
    skipped = {os.path.realpath(job_root), os.path.realpath(job_root.parent)}
    left = (*_NEVER_SHIPPED, *ignored)

    def stays(path: Path) -> bool:
        is_left = any(fnmatch.fnmatch(path.name, pattern) for pattern in left)
        return is_left or os.path.realpath(path) in skipped

    try:
        copy_folder(source, target, stays)
    except shutil.Error as error:
        if why_full(error):
            raise
        failed = error.args[0]
        path, _, reason = failed[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise ConfigError(
            f"{path}{more} could not be copied: {reason}; all of {source} is shipped to the job: make the file readable, or "
            "keep it outside the directory",
            code="SMP115",
        ) from None


def _unpack(uri: str, target: Path, session: Any) -> None:
    """Download a ``sourcedir.tar.gz`` and unpack it; raise ConfigError if it would write outside its folder."""
    bucket, key = bucket_and_key(uri)
    with tempfile.NamedTemporaryFile(suffix=".tar.gz") as archive:
        session.s3_resource.Bucket(bucket).download_file(key, archive.name)
        unpack(Path(archive.name), target, uri)
