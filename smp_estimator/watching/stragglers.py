"""Stragglers: ranks that slow down the others.

A straggler's own work in a step takes much longer than that of ranks with the same part of the model.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smp_records.records import PaceRecord

#: From this robust z on a rank is named (Iglewicz and Hoaglin 1993, "How to detect and handle outliers").
_LEAST_Z = 3.5
#: What makes the median of absolute deviations comparable with a standard deviation.
_OF_NORMAL = 1.4826
#: Part of the usual work by which ranks always differ, and which no z is measured against less than.
_USUAL_SPREAD = 0.02
#: Part of the step below which no rank is named.
_LEAST_SHARE = 0.05
#: Samples of a rank before it is judged.
_LEAST_SAMPLES = 3


@dataclass(frozen=True)
class Straggler:
    """A rank that slows down the others.

    Attributes:
        own: median seconds of its own work in a step: computing, data and saving.
        usual: the same of the ranks that it is compared with.
        z: how many robust standard deviations lie between them.
        share: part of its step by which it is longer than usual.
        mostly: the kind of work that exceeds that of the others most: ``computing``, ``data`` or ``saving``.
    """

    rank: int
    host: str
    own: float
    usual: float
    z: float
    share: float
    mostly: str

    def __str__(self) -> str:
        where = f" ({self.host})" if self.host else ""
        return (
            f"rank {self.rank}{where} holds the others up: {_seconds(self.own)} of its own work in a step where others have "
            f"{_seconds(self.usual)} (robust z {self.z:.1f}), mostly {self.mostly}; {self.share:.0%} of each step is its own doing"
        )


@dataclass(frozen=True)
class _PaceSample:
    computing: float
    data: float
    saving: float
    step: float

    @property
    def own(self) -> float:
        return self.computing + self.data + self.saving


class Stragglers:
    """Newest samples of each rank, and the stragglers among the ranks.

    Args:
        window: number of samples per rank; each covers at least one step.
    """

    def __init__(self, window: int = 15) -> None:
        self._samples: dict[int, deque[_PaceSample]] = defaultdict(lambda: deque(maxlen=window))
        self._open: dict[int, PaceRecord] = {}
        self._newest: dict[int, PaceRecord] = {}

    def add(self, records: Iterable[PaceRecord]) -> None:
        """Add the ranks' newest records. A record without a complete step is merged with the next one."""
        for record in records:
            self._newest[record.rank] = record
            whole = _joined(self._open.pop(record.rank, None), record)
            if whole.steps == 0:
                self._open[record.rank] = whole
                continue
            n = whole.steps
            sample = _PaceSample(whole.compute / n, whole.data / n, whole.saving / n, whole.seconds / n)
            self._samples[record.rank].append(sample)

    def found(self) -> list[Straggler]:
        """Return the stragglers, worst first; only ranks of the same stage are compared."""
        stages: dict[int, list[int]] = defaultdict(list)
        for rank, record in self._newest.items():
            if len(self._samples[rank]) >= _LEAST_SAMPLES:
                stages[record.stage].append(rank)
        found = []
        for ranks in stages.values():
            for rank in ranks:
                straggler = self._judge(rank, [other for other in ranks if other != rank])
                if straggler is not None:
                    found.append(straggler)
        return sorted(found, key=lambda one: -one.share)

    def _judge(self, rank: int, others: list[int]) -> Straggler | None:
        mine = list(self._samples[rank])
        theirs: list[_PaceSample] = []
        for other in others:
            theirs += self._samples[other]
        if not theirs:
            return None
        own = median(sample.own for sample in mine)
        usual = median(sample.own for sample in theirs)
        # The median of deviations, since a few slow steps must not widen what counts as usual.
        spread = _OF_NORMAL * median(abs(sample.own - usual) for sample in theirs)
        # Steps too short to be measured have medians of 0: no division by 0.
        z = (own - usual) / max(spread, _USUAL_SPREAD * usual, 1e-9)
        step = median(sample.step for sample in mine)
        share = min(1.0, (own - usual) / max(step, 1e-9))
        if z < _LEAST_Z or share < _LEAST_SHARE:
            return None
        return Straggler(rank, self._newest[rank].host, own, usual, z, share, _main_cause(mine, theirs))


def _main_cause(mine: list[_PaceSample], theirs: list[_PaceSample]) -> str:
    """Return the kind of work that exceeds that of the others most."""
    more = {}
    for kind in ("computing", "data", "saving"):
        own = median(getattr(sample, kind) for sample in mine)
        usual = median(getattr(sample, kind) for sample in theirs)
        more[kind] = own - usual
    return max(more, key=more.__getitem__)


def _joined(before: PaceRecord | None, record: PaceRecord) -> PaceRecord:
    if before is None:
        return record
    names = ("steps", "seconds", "compute", "collectives", "waiting", "data", "saving")
    return record.model_copy(update={name: getattr(before, name) + getattr(record, name) for name in names})


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
