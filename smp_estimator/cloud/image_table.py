"""The table of stock training images: what each holds, and until when it is patched.

The facts stand in ``data/training_images.json``, each row with its sources, and those with their commit or version and
date. ``null`` there means that no source says it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from functools import lru_cache
from importlib import resources
from typing import Any

#: What AWS states for its images: patches for a year from the day of release.
_PATCHED_FOR = timedelta(days=365)

#: What stands before the tag, or the digest, in an image's address: registry and repository.
_ADDRESS = re.compile(r"(?:.*/)?(?P<repository>[^/:@]+):(?P<tag>[^@]+)(?:@.*)?")


@dataclass(frozen=True)
class TrainingImage:
    """A stock image for training jobs, as the public sources describe it.

    Attributes:
        repository: the last part of its address before the tag, ``"pytorch-training"``.
        torch: version of PyTorch, as exact as the sources are.
        transformers: version of Transformers in images of Hugging Face; None in others.
        processor: ``"cpu"`` or ``"gpu"``, for instances with NVIDIA GPUs.
        tag: the part of its address after the colon that stands for the newest build.
        python: as the SDK writes it, ``"py312"``; None where no source says it.
        cuda: version of CUDA, ``"13.0"``; None in images for CPUs.
        released: the day of its release; None where no source says it.
        patched_until: the last day of its patches; of Hugging Face's images, that of the image they are built on. None where
            no source says it.
        listed: where ``patched_until`` is None, a day on which it had been released.
        mpi4py: whether it has mpi4py; None where no source says it.
        smddp: whether it has AWS's own data parallel library; None where no source says it.
        regions_without: regions in which its repository does not have it.
        sources: names of :func:`sources` that the row rests on.
    """

    repository: str
    torch: str
    transformers: str | None
    processor: str
    tag: str
    python: str | None
    cuda: str | None
    released: date | None
    patched_until: date | None
    listed: date | None
    mpi4py: bool | None
    smddp: bool | None
    regions_without: frozenset[str]
    sources: tuple[str, ...]

    @property
    def name(self) -> str:
        """Repository and tag."""
        return f"{self.repository}:{self.tag}"

    @property
    def last_patches(self) -> date | None:
        """The last day of its patches, or where no source says it, the last that it can be; None where neither is known."""
        if self.patched_until is None and self.listed is not None:
            return self.listed + _PATCHED_FOR  # it was released before that day
        return self.patched_until

    @property
    def until(self) -> str:
        """Until when it is patched, in words."""
        if self.last_patches is None:
            return "until a day that no source says"
        return f"until {self.last_patches}{'' if self.patched_until is not None else ' at the latest'}"

    def has_ended(self, day: date) -> bool:
        """Whether its patches are known to have ended before ``day``."""
        return self.last_patches is not None and day > self.last_patches

    def is_in(self, region: str | None) -> bool:
        """Whether its repository has it in a region; True for None."""
        return region not in self.regions_without


def images() -> tuple[TrainingImage, ...]:
    """All rows: PyTorch's own from the oldest to the newest, then Hugging Face's."""
    return _read()[0]


def sources() -> Mapping[str, Mapping[str, str]]:
    """By name, what a source is (``what``), its commit or version (``at``) and that one's ``date``."""
    return _read()[1]


def rows_of(torch: str, transformers: str | None = None) -> dict[str, TrainingImage]:
    """By processor, the images of a version of PyTorch, or those with this version of Transformers; empty where no row is.

    Args:
        torch: ``"2.13"`` or ``"2.13.0"``; the last part need not be that of the row, of which there is one for each.
        transformers: None for PyTorch's own images.
    """
    return {
        row.processor: row
        for row in images()
        if _minor(row.torch) == _minor(torch) and row.transformers == transformers
    }


def row_of(image_uri: Any) -> TrainingImage | None:
    """The row of an image by its address; None where the table lacks it, or where its tag does not say which it is."""
    found = _ADDRESS.fullmatch(image_uri) if isinstance(image_uri, str) else None
    if found is None:
        return None
    words = found["tag"].split("-")
    transformers = next((word.removeprefix("transformers") for word in words if word.startswith("transformers")), None)
    row = rows_of(words[0], transformers).get("cpu" if "cpu" in words else "gpu")
    return row if row is not None and row.repository == found["repository"] else None


@lru_cache(maxsize=1)
def _read() -> tuple[tuple[TrainingImage, ...], Mapping[str, Mapping[str, str]]]:
    text = (
        resources.files("smp_estimator.cloud")
        .joinpath("data")
        .joinpath("training_images.json")
        .read_text(encoding="utf-8")
    )
    said = json.loads(text)
    return tuple(map(_typed, said["images"])), said["sources"]


def _typed(row: Mapping[str, Any]) -> TrainingImage:
    """A row of the file, which leaves out what has no meaning for an image."""
    made: dict[str, Any] = {"transformers": None, "cuda": None, "released": None, "listed": None, **row}
    for name in ("released", "patched_until", "listed"):
        made[name] = date.fromisoformat(made[name]) if made[name] is not None else None
    made |= {"regions_without": frozenset(row.get("regions_without", ())), "sources": tuple(row["sources"])}
    return TrainingImage(**made)


def _minor(version: str) -> list[str]:
    return re.findall(r"\d+", version)[:2]
