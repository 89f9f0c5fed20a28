"""A cell of a notebook for version 2 of the SDK, with the jobs that it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cell:
    """Code of a notebook, and its meaning.

    Attributes:
        kind: what occurs in it.
        pieces: the code, by cell.
        jobs: each CreateTrainingJob request, as :mod:`facts` reads it.
        marks: a part of each comment that migrate writes.
        for_a_person: further cells that are marked, and fail until a person changes them.
        is_user: whether the caller is a user of the account, not a role.
    """

    kind: str
    pieces: tuple[str, ...]
    jobs: tuple[dict[str, Any], ...] = ()
    marks: tuple[str, ...] = ()
    for_a_person: tuple[str, ...] = ()
    is_user: bool = False
