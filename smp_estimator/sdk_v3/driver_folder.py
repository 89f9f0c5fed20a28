"""The folder that ``ModelTrainer`` copies into a job: the driver, and with it the runtime as a wheel."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from smp_estimator.cloud import entry, source
from smp_estimator.sdk_v3.driver import smp_driver

_DRIVER = Path(smp_driver.__file__)
_FORWARD = _DRIVER.with_name("forward_signals.sh")

#: Where the container has what this folder holds.
_IN_CONTAINER = "/opt/ml/input/data/sm_drivers/distributed_drivers"

#: What stands behind the folder's path in a command line of ``sm_train.sh``. The driver goes on in the background, so
#: that the shell, which is the container's first process, can pass on the signal that stops a job.
COMMAND = f"{_DRIVER.name} & . {_IN_CONTAINER}/{_FORWARD.name}"


def fill(folder: Path, *, ship_runtime: bool) -> None:
    """Write the driver, and with ``ship_runtime`` the runtime, into a folder.

    Raises:
        RuntimeError: the package was never installed, so that its requirements are unknown.
    """
    for file in (_DRIVER, _FORWARD):
        shutil.copyfile(file, folder / file.name)
    shutil.copyfile(entry.__file__, folder / "smp_entry.py")
    if ship_runtime:
        source.build_wheel(folder)
        wanted = "".join(f"{line}\n" for line in source.travelling_requirements())
        (folder / smp_driver.REQUIREMENTS).write_text(wanted, encoding="utf-8")


class DriverFolder:
    """A temporary folder with the driver; it lasts as long as this object."""

    def __init__(self, *, ship_runtime: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="smp-driver-")
        fill(self.path, ship_runtime=ship_runtime)

    @property
    def path(self) -> Path:
        """Return the path of the folder."""
        return Path(self._folder.name)
