"""Lower bounds on a script's work at any degrees, from rehearsals on one GPU with two batch sizes.

The operations, bytes and kernels of a module have a fixed part per microbatch (its weights) and a part that grows with the
samples. Two batch sizes separate these parts. The time of a microbatch of any size then has the same roofline bound that a
rehearsal uses. A rank with more stages or shards does at least its part of that work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smp_estimator.planning.search.bounds import Needs
from smp_estimator.rehearsal.result import on_gpu

if TYPE_CHECKING:
    from smp_records.rate_card import RateCard
    from smp_records.rehearsal import KindReport, ModuleWork

#: Modules of a list, which stages are made of.
_OF_A_LIST = re.compile(r"^(.*?)\.?(\d+)(?:\.|$)")

_PHASES = ("forward", "backward")

#: Operations of backward for each of forward, above which a part of them is forward's own.
_WITH_FORWARD_AGAIN = 2.3


@dataclass(frozen=True)
class Grows:
    """A quantity with a fixed part and a part for each sample."""

    fixed: float
    each: float

    @classmethod
    def through(cls, sizes: tuple[int, int], counts: tuple[float, float]) -> Grows:
        """Fit two measurements; if they do not grow linearly, the result is a lower bound."""
        each = max(0.0, (counts[1] - counts[0]) / (sizes[1] - sizes[0]))
        fixed = counts[0] - each * sizes[0]
        if fixed >= 0:
            return cls(fixed, each)
        return cls(0.0, min(count / size for size, count in zip(sizes, counts, strict=True)))

    def at(self, samples: float) -> float:
        """Return the quantity for a number of samples."""
        return self.fixed + self.each * samples


@dataclass(frozen=True)
class _ModuleWork:
    """A module's work in one phase, in seconds but for the kernels."""

    phase: str
    arithmetic: Grows
    memory: Grows
    kernels: int


def _by_module(rows: Iterable[ModuleWork]) -> dict[tuple[str, str, str], ModuleWork]:
    """Return the rows that limit a step, so that those of two batch sizes can be matched."""
    found = {}
    for row in rows:
        if row.phase in (*_PHASES, "update"):
            found[row.module, row.phase, row.dtype] = row
    return found


@dataclass(frozen=True)
class LeastWork:
    """Lower bounds on the seconds of microbatches on one GPU.

    Args:
        rows: of all modules.
        launch: seconds to start a kernel.
    """

    rows: tuple[_ModuleWork, ...] = field(repr=False)
    launch: float
    _known: dict[int, tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls, card: RateCard, sizes: tuple[int, int], work: tuple[Iterable[ModuleWork], Iterable[ModuleWork]]
    ) -> LeastWork:
        """Compute the bounds from the same step with two batch sizes."""
        smaller, larger = map(_by_module, work)
        memory = card.memory_part * card.memory_bytes_per_second
        rows = []
        for key, one in smaller.items():
            other = larger.get(key)
            if other is None:
                continue
            peak = card.matrix_part * (card.flops_per_second.get(one.dtype) or max(card.flops_per_second.values()))
            arithmetic = Grows.through(sizes, (one.flops / peak, other.flops / peak))
            moved = Grows.through(sizes, (one.bytes / memory, other.bytes / memory))
            rows.append(_ModuleWork(one.phase, arithmetic, moved, min(one.calls, other.calls)))
        return cls(tuple(rows), card.launch_seconds)

    def microbatch(self, samples: int) -> tuple[float, float]:
        """Return the seconds of a microbatch's forward and backward."""
        if samples not in self._known:
            forward, backward = (self._seconds_of(phase, samples) for phase in _PHASES)
            self._known[samples] = forward, backward
        return self._known[samples]

    def _seconds_of(self, phase: str, samples: int) -> float:
        seconds = 0.0
        for row in self.rows:
            if row.phase == phase:
                busy = max(row.arithmetic.at(samples), row.memory.at(samples))
                seconds += busy + self.launch * row.kernels
        return seconds

    def arithmetic(self, phase: str) -> float:
        """Return the seconds of a sample's operations alone, for any microbatch size and without kernel starts."""
        return sum(row.arithmetic.each for row in self.rows if row.phase == phase)

    @property
    def update(self) -> float:
        """Return the seconds to read and write the tensors that the optimizer changes, for all parameters."""
        return sum(row.memory.fixed for row in self.rows if row.phase == "update")


@dataclass(frozen=True)
class Alone:
    """A script's step on one GPU, rehearsed with batches of two sizes.

    Attributes:
        sizes: samples of the batches, the smaller one first.
        kinds: the reports of the two rehearsals.
    """

    sizes: tuple[int, int]
    kinds: tuple[KindReport, KindReport]

    @property
    def layers(self) -> int:
        """Return the number of modules in the longest list, which stages are made of, or 1 if there is no list."""
        numbers: dict[str, set[str]] = {}
        for row in self.kinds[0].work:
            match = _OF_A_LIST.match(row.module)
            if match is not None:
                numbers.setdefault(match[1], set()).add(match[2])
        lengths = [len(found) for found in numbers.values()]
        return max(lengths, default=1)

    @property
    def checkpoints(self) -> bool:
        """Return whether backward recomputes much of forward: it then has clearly more than twice the operations of forward."""
        forward, backward = (sum(row.flops for row in self.kinds[0].work if row.phase == phase) for phase in _PHASES)
        return backward > _WITH_FORWARD_AGAIN * forward

    def needs(self, card: RateCard) -> Needs:
        """Return the terms that no degree reduces."""
        one, other = self.kinds
        least = LeastWork.of(card, self.sizes, (one.work, other.work))
        elements = max(1, one.parameters)
        each = one.classes.get("parameter", 0) / elements
        return Needs(
            forward=least.arithmetic("forward"),
            backward=least.arithmetic("backward"),
            of_microbatch=least.microbatch,
            update=least.update,
            sums_last=True,
            elements=one.parameters,
            kept_bytes=each,
            updated_bytes=one.classes.get("optimizer state", 0) / elements,
            layers=0,
            layer_elements=one.parameters if one.trained_parameters is None else one.trained_parameters,
            summed_bytes=each,
            element_bytes=each,
            gathers=1.0,  # what autograd keeps nothing of is not gathered again
            # Whatever is held at the peak of the larger batch is there with the smaller one, too, and holds that much less.
            activation_bytes=max(0.0, (on_gpu(other) - on_gpu(one)) / (self.sizes[1] - self.sizes[0])),
        )


__all__ = ["Alone", "Grows", "LeastWork"]
