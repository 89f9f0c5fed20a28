"""What tests of ``ModelTrainer`` share; they run where version 3 of the SageMaker SDK is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from smp_estimator.sdk.installed import installed_version
from support.platform.cloud import IMAGE, ROLE


def require_sdk_3() -> None:
    """Leave a file of tests out where the SDK is another one."""
    version = installed_version()
    if version is None or not version.startswith("3."):
        pytest.skip(
            f"needs version 3 of the SageMaker SDK, and {version or 'none'} is installed: make test-v3",
            allow_module_level=True,
        )


def trainer(script: Path, **given: Any) -> Any:
    """A trainer of two ml.p4d.24xlarge; ``compute``, ``parallel`` and ``code`` are fields of those records, None takes one out.

    Args:
        given: arguments; ``kind`` is the class of the trainer.
    """
    from sagemaker.core.training.configs import Compute, SourceCode

    from smp_estimator.model_trainer import ModelParallel, ModelTrainer

    compute = {"instance_type": "ml.p4d.24xlarge", "instance_count": 2, **given.pop("compute", {})}
    code = {"source_dir": str(script), "entry_script": "train.py", **given.pop("code", {})}
    parallel = given.pop("parallel", {"parameters": {"ddp": True}, "processes_per_host": 8})
    merged: dict[str, Any] = {
        "source_code": SourceCode(**code),
        "compute": Compute(**{name: value for name, value in compute.items() if value is not None}),
        "distributed": ModelParallel(**parallel) if isinstance(parallel, Mapping) else parallel,
        "training_image": IMAGE,
        "role": ROLE,
        **given,
    }
    made = given.pop("kind", ModelTrainer)
    merged.pop("kind", None)
    return made(**{name: value for name, value in merged.items() if value is not None})


def here(script: Path, **given: Any) -> Any:
    """A trainer whose jobs are processes of this machine."""
    compute = {"instance_type": "local", "instance_count": 1, **given.pop("compute", {})}
    parallel = given.pop("parallel", {"parameters": {"ddp": True}, "processes_per_host": 2})
    return trainer(script, **{"compute": compute, "parallel": parallel, "training_image": None, "role": None, **given})
