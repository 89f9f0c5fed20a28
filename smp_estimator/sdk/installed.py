"""Which SageMaker SDK is installed: version 2, version 3, or none. Nothing of it is imported to find out.

Version 2 has the estimators that :class:`~smp_estimator.SMPEstimator` extends, version 3 has ``ModelTrainer`` in their
place, which :mod:`smp_estimator.model_trainer` extends. One environment holds one of them.
"""

from __future__ import annotations

import importlib.metadata
import sys

from smp_config.error_codes import Coded
from smp_config.machine.extras import install_command

#: The extra that installs each.
EXTRAS = {2: "sagemaker", 3: "sagemaker3"}

#: What each is for.
_OFFERS = {
    2: "SMPEstimator, SMPHuggingFace and ProcessSession",
    3: "ModelTrainer and ModelParallel of smp_estimator.model_trainer",
}


class SDKMissing(Coded, ImportError):
    """The required version of the SDK is not installed; the message names the installed version and what to install."""

    code = "SMP111"


def installed_version() -> str | None:
    """Return the version of the installed SDK, such as ``"3.27.0"``, or None if there is none."""
    try:
        return importlib.metadata.version("sagemaker")
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_major() -> int | None:
    """Return the major version of the installed SDK, 2 or 3 (or a later one), or None if there is none."""
    version = installed_version()
    return None if version is None else int(version.split(".")[0])


def describe() -> str:
    """Describe the installed SDK and its use: ``3.27.0, for ModelTrainer and …``."""
    version, major = installed_version(), installed_major()
    if version is None or major is None:
        return "none"
    return f"{version}, for {_OFFERS[major]}" if major in _OFFERS else f"{version}, which this package does not know"


def require(major: int) -> None:
    """Check that the installed SDK has this major version.

    Args:
        major: 2 or 3.

    Raises:
        SDKMissing: another version is installed, or none; the message names the command to install it.
    """
    version = installed_version()
    found_major = None if version is None else int(version.split(".")[0])
    if found_major == major:
        return
    found = "no SageMaker SDK is installed" if version is None else f"the SageMaker SDK {version} is installed"
    other = {2: 3, 3: 2}[major]
    instead = f"; with the SDK that is there use {_OFFERS[other]}" if found_major == other else ""
    raise SDKMissing(
        f"{_OFFERS[major]} need version {major} of the SageMaker SDK, and {found} for {sys.executable}; install it with "
        f'"{install_command(EXTRAS[major])}" in an environment of its own (versions 2 and 3 exclude each other){instead}'
    )
