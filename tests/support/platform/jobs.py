"""What tests of whole jobs share besides fixtures."""

from __future__ import annotations

import json
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

ENTRYPOINTS = Path(__file__).parents[3] / "entrypoints"

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


def model_parallel(processes: int = 2, **parameters: Any) -> dict[str, Any]:
    """A distribution of the model parallel library."""
    return {
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}},
        "mpi": {"enabled": True, "processes_per_host": processes},
    }


def artifact(estimator: Any, name: str) -> Any:
    """A JSON file out of the job's ``model.tar.gz``."""
    with tarfile.open(estimator.model_data.removeprefix("file://")) as archive:
        return json.load(archive.extractfile(name))


def some_text(folder: Path) -> Path:
    """Put about half a megabyte of real text into a folder; gives the folder."""
    library = Path(sysconfig.get_paths()["stdlib"])
    written = b"".join(p.read_bytes() for p in sorted(library.glob("*.py"))[:20])[:500_000]
    (folder / "train.txt").write_bytes(written)
    return folder
