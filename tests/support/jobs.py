"""What tests of whole jobs share besides fixtures."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

ENTRYPOINTS = Path(__file__).parents[2] / "entrypoints"

#: Small enough that a step takes milliseconds.
TINY = {
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "seq_len": 32,
    "batch_size": 16,
    "steps": 20,
    "eval_interval": 0,
    "eval_batches": 1,
    "checkpoint_interval": 0,
    "sample_bytes": 0,
    "log_losses": 1,
}


def artifact(estimator: Any, name: str) -> Any:
    """A JSON file out of the job's ``model.tar.gz``."""
    with tarfile.open(estimator.model_data.removeprefix("file://")) as archive:
        return json.load(archive.extractfile(name))
