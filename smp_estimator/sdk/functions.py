"""Functions that versions 2 and 3 of the SageMaker SDK have alike, from whichever is installed; loaded when first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from smp_config.machine.extras import install_command
from smp_estimator.sdk.installed import EXTRAS, SDKMissing, installed_major

#: By major version, where its helpers stand.
_HELPERS = {2: "sagemaker.utils", 3: "sagemaker.core.common_utils"}
_IMAGES = {2: "sagemaker.image_uris", 3: "sagemaker.core.image_uris"}


def _of_the_sdk(places: dict[int, str], name: str) -> Callable[..., Any]:
    major = installed_major()
    if major not in places:
        raise SDKMissing(
            f"{name} is a function of the SageMaker SDK, which is not installed here in version 2 or 3; install it with "
            f'"{install_command(EXTRAS[3])}", or with "{install_command(EXTRAS[2])}" for SMPEstimator'
        )
    if major == 2:
        import smp_estimator.sdk.version_2  # noqa: F401 - its first import puts off the search for credentials
    found: Callable[..., Any] = getattr(importlib.import_module(places[major]), name)
    return found


def download_folder(bucket: str, prefix: str, folder: str, session: Any) -> None:
    """Download all objects under an S3 prefix; ``session`` has the boto3 resource ``s3_resource``."""
    _of_the_sdk(_HELPERS, "download_folder")(bucket, prefix, folder, session)


def secondary_training_status_changed(description: dict[str, Any], before: dict[str, Any] | None) -> bool:
    """Return whether a job's stage has changed between two answers of DescribeTrainingJob."""
    return bool(_of_the_sdk(_HELPERS, "secondary_training_status_changed")(description, before))


def secondary_training_status_message(description: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Return the stages that a job has entered since ``before``, one line each."""
    return str(_of_the_sdk(_HELPERS, "secondary_training_status_message")(description, before))


def config_for_framework(framework: str) -> dict[str, Any]:
    """Return the SDK's table of images of a framework, such as ``"pytorch"`` or ``"huggingface"``.

    Raises:
        FileNotFoundError: the SDK has no table with this name.
    """
    found: dict[str, Any] = _of_the_sdk(_IMAGES, "config_for_framework")(framework)
    return found


def retrieve_image(framework: str, region: str, **which: Any) -> str:
    """Return the SDK's address of a training image; ``which`` as for its ``image_uris.retrieve``."""
    return str(_of_the_sdk(_IMAGES, "retrieve")(framework, region, image_scope="training", **which))
