"""The table of stock training images: the contents of each image, and how long it is patched.

The data is in ``data/training_images.json``. Each row names its sources, and each source has its commit or
version and its date. ``null`` means that no source states the value.
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
        tag: the part of its address after the colon; it refers to the newest build.
        python: in the SDK's notation, ``"py312"``; None if no source states it.
        cuda: version of CUDA, ``"13.0"``; None in images for CPUs.
        released: the day of its release; None if no source states it.
        patched_until: the last day of its patches. For Hugging Face's images, the last day of the image they are
            built on. None if no source states it.
        listed: if ``patched_until`` is None, a day on which it had been released.
        mpi4py: whether it has mpi4py; None if no source states it.
        smddp: whether it has AWS's own data parallel library; None if no source states it.
        regions_without: regions in which its repository does not have it.
        sources: names of the row's sources, as in :func:`sources`.
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
        """Return the repository and tag."""
        return f"{self.repository}:{self.tag}"

    @property
    def last_patches(self) -> date | None:
        """Return the last day of the image's patches, or None if it cannot be known.

        If no source states the day, this is the latest day possible: one year after the image was listed.
        """
        if self.patched_until is None and self.listed is not None:
            return self.listed + _PATCHED_FOR  # it was released before that day
        return self.patched_until

    @property
    def until(self) -> str:
        """Return how long the image is patched, in words."""
        if self.last_patches is None:
            return "until a day that no source says"
        return f"until {self.last_patches}{'' if self.patched_until is not None else ' at the latest'}"

    def has_ended(self, day: date) -> bool:
        """Return whether the image's patches are known to have ended before ``day``."""
        return self.last_patches is not None and day > self.last_patches

    def is_in(self, region: str | None) -> bool:
        """Return whether the image's repository has it in a region; True for None."""
        return region not in self.regions_without


def images() -> tuple[TrainingImage, ...]:
    """Return all rows: PyTorch's own from the oldest to the newest, then Hugging Face's."""
    return _read()[0]


def sources() -> Mapping[str, Mapping[str, str]]:
    """Return the sources by name: description (``what``), commit or version (``at``) and its ``date``."""
    return _read()[1]


def rows_of(torch: str, transformers: str | None = None) -> dict[str, TrainingImage]:
    """Return the images of a version of PyTorch by processor; empty if the table has none.

    Args:
        torch: ``"2.13"`` or ``"2.13.0"``. Only the first two parts are compared: each minor version has one row.
        transformers: version of Transformers in the images; None for PyTorch's own images.
    """
    return {
        row.processor: row
        for row in images()
        if _minor(row.torch) == _minor(torch) and row.transformers == transformers
    }


def row_of(image_uri: Any) -> TrainingImage | None:
    """Return the row of the image with this address, or None if the table lacks it or the tag is not specific."""
    found = _ADDRESS.fullmatch(image_uri) if isinstance(image_uri, str) else None
    if found is None:
        return None
    words = found["tag"].split("-")
    prefix = "transformers"
    transformers = next((word.removeprefix(prefix) for word in words if word.startswith(prefix)), None)
    processor = "cpu" if "cpu" in words else "gpu"
    row = rows_of(words[0], transformers).get(processor)
    if row is None or row.repository != found["repository"]:
        return None
    return row


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
    """Return an image from a row of the file; values that the row leaves out become None or empty."""
    made: dict[str, Any] = {"transformers": None, "cuda": None, "released": None, "listed": None, **row}
    for name in ("released", "patched_until", "listed"):
        made[name] = date.fromisoformat(made[name]) if made[name] is not None else None
    made |= {"regions_without": frozenset(row.get("regions_without", ())), "sources": tuple(row["sources"])}
    return TrainingImage(**made)


def _minor(version: str) -> list[str]:
    return re.findall(r"\d+", version)[:2]
