"""Settings that no job can have, given to ``ModelTrainer``: refused before anything is started, with the setting named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.faults import hostile
from support.platform.sdk3 import require_sdk_3

require_sdk_3()

from smp_config import ConfigError  # noqa: E402 - only where the SDK is installed
from smp_estimator.model_trainer import ModelParallel  # noqa: E402

Make = Callable[..., Any]


def _parallel(**given: Any) -> dict[str, Any]:
    return {"distributed": ModelParallel(**{"processes_per_host": 2, "parameters": {"ddp": True}, **given})}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (lambda: _parallel(processes_per_host=100_000), "100000 processes"),
        (lambda: _parallel(parameters={"ddp": True, "sdp_gradient_clipping": 10**400}), "401 digits"),
        (lambda: _parallel(custom_mpi_options="-x A=\0"), "holds the character NUL"),
        (lambda: {**_parallel(), "compute": {"instance_count": 1_000_000}}, "1000000"),
        (lambda: {**_parallel(), "environment": {"A=B": "1"}}, "an environment variable is called 'A=B'"),
        (lambda: {**_parallel(), "environment": {"A": "a\0b"}}, "environment['A'] holds the character NUL"),
        (lambda: {**_parallel(), "environment": {"SMP_TIMEOUT_SECONDS": "1e18"}}, "SMP_TIMEOUT_SECONDS is '1e18'"),
        (lambda: {**_parallel(), "hyperparameters": {"a=b": 1}}, "a hyperparameter is called 'a=b'"),
        (lambda: {**_parallel(), "hyperparameters": {"a": "\ud800"}}, "half of a surrogate pair"),
    ],
)
def test_refused_at_once(make: Make, tmp_path: Path, arguments: Callable[[], dict[str, Any]], part: str) -> None:
    with hostile.alarm(), pytest.raises(ConfigError) as caught:
        make(**arguments()).train(wait=False)
    assert part in str(caught.value)
    assert not (tmp_path / "jobs").exists()
