"""The measured matrix of language models: family × mode, by version of Transformers; ``benchmarks/models.py`` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

#: Modes in the order in which they are shown.
MODES = ("pp 2", "sdp 2", "tp 2", "tp 2 × pp 2")
ALONE = "one process"


@dataclass(frozen=True)
class Outcome:
    """What became of a family under a mode.

    Attributes:
        is_equal: whether losses and gradients were those of one process.
        reason: why not.
        split: of the elements of matrices, the part that a tensor parallel rank has not.
        traffic: bytes that a rank sends for a layer, divided by those of Megatron's.
    """

    is_equal: bool
    reason: str = ""
    split: float | None = None
    traffic: float | None = None


@dataclass(frozen=True)
class FamilyOutcomes:
    """A family of one of Transformers' mappings.

    Attributes:
        kind: ``causal``, ``seq2seq`` or ``masked``.
        model_type: as in its configuration.
        majors: by Transformers' major version, the outcome by mode, or by ``one process`` alone where that did not train.
    """

    kind: str
    model_type: str
    majors: dict[str, dict[str, Outcome]]

    def trains_alone(self, major: str) -> bool:
        """Whether one process trains it with that version."""
        of = self.majors.get(major, {})
        return bool(of) and (ALONE not in of or of[ALONE].is_equal)


@dataclass(frozen=True)
class Matrix:
    """All that was measured.

    Attributes:
        versions: by Transformers' major version, those of the packages.
        families: in the order of their names.
    """

    versions: dict[str, dict[str, str]]
    families: tuple[FamilyOutcomes, ...]

    def matching(self, words: Iterable[str]) -> list[FamilyOutcomes]:
        """Families of which a word is a part of the name, or the kind; all without words."""
        wanted = [word.lower() for word in words]
        return [
            family
            for family in self.families
            if not wanted or any(word in family.model_type.lower() or word == family.kind for word in wanted)
        ]

    def counts(self, major: str) -> Iterator[tuple[str, int, int]]:
        """By mode, how many families are equal to one process, of those that it trains and that were measured."""
        trained = [family.majors[major] for family in self.families if family.trains_alone(major)]
        for mode in MODES:
            found = [of[mode] for of in trained if mode in of]
            yield mode, sum(outcome.is_equal for outcome in found), len(found)


def read_matrix() -> Matrix:
    """The matrix that this release was measured with."""
    return parsed(json.loads(resources.files(__package__).joinpath("outcomes.json").read_text(encoding="utf-8")))


def parsed(data: dict[str, Any]) -> Matrix:
    """The matrix as it stands in the file."""
    families = [
        FamilyOutcomes(
            kind,
            model_type,
            {major: {mode: Outcome(**outcome) for mode, outcome in of.items()} for major, of in majors.items()},
        )
        for kind, model_type, majors in data["families"]
    ]
    return Matrix(data["versions"], tuple(families))


def cell(outcome: Outcome | None) -> str:
    """An outcome in a word, with split share and traffic where there are some."""
    if outcome is None:
        return "–"
    if not outcome.is_equal:
        return "no"
    split = "" if outcome.split is None else f" {outcome.split:.2f}"
    traffic = "" if outcome.traffic is None else f" / {outcome.traffic:.2f}"
    return f"equal{split}{traffic}"
