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
_TP = "tp 2"

#: Of the matrices, what a rank of two should be spared; half would be all.
LEAST_SPLIT = 0.4
#: Bytes of a layer, divided by those of Megatron's, that count as the same.
MOST_TRAFFIC = 1.02


@dataclass(frozen=True)
class FamilyOutcome:
    """The result of a family in a mode.

    Attributes:
        is_equal: whether losses and gradients were those of one process.
        reason: the reason if they were not.
        split: the part of the matrices' elements that a tensor parallel rank does not hold.
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
    majors: dict[str, dict[str, FamilyOutcome]]

    def trains_alone(self, major: str) -> bool:
        """Return whether one process trains the family with this major version of Transformers."""
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
        """Return the families with a word in their name or as their kind; without words, all families."""
        wanted = [word.lower() for word in words]
        if not wanted:
            return list(self.families)
        return [family for family in self.families if any(_is_meant(family, word) for word in wanted)]

    def counts(self, major: str) -> Iterator[tuple[str, int, int]]:
        """Yield each mode with two counts: families equal to one process, and families measured.

        Only families that one process trains are counted.
        """
        trained = [family.majors[major] for family in self.families if family.trains_alone(major)]
        for mode in MODES:
            found = [of[mode] for of in trained if mode in of]
            yield mode, sum(outcome.is_equal for outcome in found), len(found)

    def split_well(self, major: str) -> Iterator[tuple[str, int, int]]:
        """Yield each criterion of a good split with two counts, among the families that are equal at tp 2.

        The counts are the families that meet it and those that were measured. One criterion is the part of the matrices that a
        rank is spared. The other is the bytes that it sends, compared with those of Megatron's layer.
        """
        found = [family.majors[major][_TP] for family in self.families if _TP in family.majors.get(major, {})]
        spared = [outcome.split for outcome in found if outcome.is_equal and outcome.split is not None]
        traffic = [outcome.traffic for outcome in found if outcome.is_equal and outcome.traffic is not None]
        yield (
            f"at {_TP}, a rank is spared {LEAST_SPLIT} of the matrices or more",
            sum(s >= LEAST_SPLIT for s in spared),
            len(spared),
        )
        yield (
            f"at {_TP}, bytes ÷ Megatron's are {MOST_TRAFFIC} or less",
            sum(t <= MOST_TRAFFIC for t in traffic),
            len(traffic),
        )


def read_matrix() -> Matrix:
    """Return the matrix that was measured for this release."""
    return parse_matrix(json.loads(resources.files(__package__).joinpath("outcomes.json").read_text(encoding="utf-8")))


def parse_matrix(data: dict[str, Any]) -> Matrix:
    """Parse a matrix from the contents of its file."""
    families = []
    for kind, model_type, majors in data["families"]:
        outcomes = {major: _parse_modes(modes) for major, modes in majors.items()}
        families.append(FamilyOutcomes(kind, model_type, outcomes))
    return Matrix(data["versions"], tuple(families))


def _parse_modes(modes: dict[str, Any]) -> dict[str, FamilyOutcome]:
    return {mode: FamilyOutcome(**outcome) for mode, outcome in modes.items()}


def format_cell(outcome: FamilyOutcome | None) -> str:
    """Return an outcome in one word, with split share and traffic if they are known."""
    if outcome is None:
        return "–"
    if not outcome.is_equal:
        return "no"
    text = "equal"
    if outcome.split is not None:
        text += f" {outcome.split:.2f}"
    if outcome.traffic is not None:
        text += f" / {outcome.traffic:.2f}"
    return text


def _is_meant(family: FamilyOutcomes, word: str) -> bool:
    """Return whether a lower-case word is a part of a family's model type, or its kind."""
    return word in family.model_type.lower() or word == family.kind
