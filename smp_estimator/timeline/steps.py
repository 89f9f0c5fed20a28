"""A job's timeline on one clock: its steps, how long they took, and which part of the time each rank waited."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from smp_config import ConfigError
from smp_estimator.figures.colours import colour_of
from smp_estimator.figures.step_lanes import Bar, lanes
from smp_estimator.planning.batches import idle_fraction

if TYPE_CHECKING:
    from smp_records.timeline import Kind, RankTimeline, StepTimeline


@dataclass(frozen=True)
class Block:
    """One computation of a rank; times in seconds of the job's clock."""

    name: str
    kind: Kind
    microbatch: int
    path: str
    start: float
    stop: float


@dataclass(frozen=True)
class RankStep:
    """One step of one rank, its blocks in the order of time."""

    rank: int
    stage: int
    replica: int
    host: str
    start: float
    stop: float
    blocks: tuple[Block, ...]
    failed: bool = False

    def busy_seconds(self, kinds: str = "FBWS") -> float:
        """Return the time in which the rank computed, in seconds; blocks that overlap count once."""
        busy, until = 0.0, float("-inf")
        for block in self.blocks:
            if block.kind in kinds and block.stop > until:
                busy += block.stop - max(block.start, until)
                until = block.stop
        return busy


@dataclass(frozen=True)
class Step:
    """One step of all ranks."""

    number: int
    ranks: tuple[RankStep, ...]

    @cached_property
    def _windows(self) -> dict[int, tuple[float, float]]:
        """Return the begin of the first block and the end of the last, per replica.

        Pipelines of different replicas do not start together.
        """
        windows: dict[int, tuple[float, float]] = {}
        for rank in self.ranks:
            for block in rank.blocks:
                start, stop = windows.get(rank.replica, (block.start, block.stop))
                windows[rank.replica] = min(start, block.start), max(stop, block.stop)
        return windows

    @property
    def window(self) -> tuple[float, float]:
        """Return the begin of the job's first block and the end of its last, in seconds of its clock."""
        begins = [start for start, _ in self._windows.values()]
        ends = [stop for _, stop in self._windows.values()]
        return min(begins), max(ends)

    @property
    def makespan(self) -> float:
        """Return the seconds from the first block to the last of the slowest pipeline."""
        return max(stop - start for start, stop in self._windows.values())

    @property
    def trains(self) -> bool:
        """Return whether the step ran to its end with a backward pass."""
        return self.kind == "training"

    @property
    def kind(self) -> str:
        """Return ``failed`` if a rank ended with an error, ``training`` if there was a backward pass, or ``evaluation``."""
        kinds: set[str] = set()
        for rank in self.ranks:
            if rank.failed:
                return "failed"
            kinds.update(block.kind for block in rank.blocks)
        return "training" if "B" in kinds else "evaluation"

    @property
    def title(self) -> str:
        """Return ``step 12``, ``step 12 (evaluation)`` or ``step 12 (failed)``."""
        return f"step {self.number}" if self.trains else f"step {self.number} ({self.kind})"

    def idle_of(self, rank: RankStep) -> float:
        """Return the part of the pipeline's time in which a rank did not compute."""
        start, stop = self._windows.get(rank.replica, (0.0, 0.0))
        return 1.0 - rank.busy_seconds() / (stop - start) if stop > start else 0.0

    @property
    def idle(self) -> float:
        """Return the mean of the ranks' idle fractions."""
        return sum(map(self.idle_of, self.ranks)) / len(self.ranks)

    @property
    def stages(self) -> int:
        """Return the number of pipeline stages that the ranks compute."""
        return len({rank.stage for rank in self.ranks})

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches in the step."""
        found: set[int] = set()
        for rank in self.ranks:
            found.update(block.microbatch for block in rank.blocks)
        return len(found)

    @property
    def expected_idle(self) -> float:
        """Return (p − 1) / (m + p − 1), the idle fraction of an ideal pipeline.

        It assumes stages of equal time, free communication, and no other code in the step function.
        """
        return idle_fraction(self.stages, self.microbatches)

    @property
    def headline(self) -> str:
        """Return a line about the step's time and idle fraction, measured and expected.

        ``step 12: 310.8 ms, 23.1% idle ((p − 1)/(m + p − 1) = 20.0% for 2 stages, 4 microbatches)``.
        """
        return (
            f"{self.title}: {self.makespan * 1e3:.1f} ms, {self.idle:.1%} idle ((p − 1)/(m + p − 1) = {self.expected_idle:.1%} "
            f"for {self.stages} stages, {self.microbatches} microbatches)"
        )

    def _repr_html_(self) -> str:
        """Return the picture that a notebook shows: a lane for each rank."""
        rows = [(f"rank {rank.rank}  {self.idle_of(rank):.0%} idle", map(_bar, rank.blocks)) for rank in self.ranks]
        return lanes(self.headline, rows, *self.window)


def _bar(block: Block) -> Bar:
    milliseconds = (block.stop - block.start) * 1e3
    tip = f"{block.name} of microbatch {block.microbatch}: {milliseconds:.2f} ms"
    return Bar(block.start, block.stop, colour_of(block.kind, block.microbatch), str(block.microbatch), tip)


@dataclass(frozen=True)
class JobTimeline:
    """The timelines of all ranks of a job, on one clock.

    Attributes:
        steps: the steps that every rank recorded, ascending.
        ranks: global ranks, ascending.
        missing: ranks of the job without a file.
        clock_error: most seconds by which blocks of different hosts can be shifted against each other.
    """

    job: str
    steps: tuple[Step, ...]
    ranks: tuple[int, ...]
    missing: tuple[int, ...] = ()
    clock_error: float = 0.0

    @classmethod
    def of(cls, files: Iterable[tuple[str, RankTimeline]]) -> JobTimeline:
        """Combine the ranks' files; each comes with a name for messages.

        Raises:
            ConfigError: files of different jobs, two files of one rank, or no step that all ranks recorded.
        """
        by_rank: dict[int, tuple[str, RankTimeline]] = {}
        for name, content in files:
            other_name, other = next(iter(by_rank.values()), (name, content))
            if other.job != content.job:
                raise ConfigError(
                    f"the timelines are of different jobs: {other_name} is of {other.job!r}, {name} of {content.job!r}; times of "
                    "different runs have nothing in common: name the output of one job",
                    code="SMP116",
                )
            if content.rank in by_rank:
                raise ConfigError(
                    f"rank {content.rank} has two timelines, {by_rank[content.rank][0]} and {name}; probably one is a copy: "
                    "remove it, or name the folder that holds each rank once",
                    code="SMP116",
                )
            by_rank[content.rank] = name, content
        ranks = [by_rank[rank][1] for rank in sorted(by_rank)]
        world = max(rank.world_size for rank in ranks)
        return cls(
            job=ranks[0].job,
            steps=_common_steps(ranks),
            ranks=tuple(sorted(by_rank)),
            missing=tuple(rank for rank in range(world) if rank not in by_rank),
            clock_error=max(rank.offset_error for rank in ranks),
        )

    def step(self, number: int | None = None) -> Step:
        """Return the step of this number; None selects the training step of median makespan.

        If the number of training steps is even, this is the faster of the two middle ones. If there are none, the
        newest step is returned.

        Raises:
            ConfigError: the step was not recorded.
        """
        if number is None:
            # Rounded to the nanosecond: steps that differ only by rounding keep their order.
            training = sorted((step for step in self.steps if step.trains), key=lambda step: round(step.makespan, 9))
            return training[(len(training) - 1) // 2] if training else self.steps[-1]
        for step in self.steps:
            if step.number == number:
                return step
        raise ConfigError(
            f"step {number} was not recorded by every rank; the job kept steps {_ranges([s.number for s in self.steps])}: use one "
            "of these, or run again with a larger SMP_TIMELINE, the number of newest steps to keep",
            code="SMP116",
        )

    def _repr_html_(self) -> str:
        """Return the notebook's picture of the step that :meth:`step` returns."""
        return self.step()._repr_html_()


def _common_steps(ranks: list[RankTimeline]) -> tuple[Step, ...]:
    recorded = [{step.number: step for step in rank.steps} for rank in ranks]
    common = sorted(set.intersection(*map(set, recorded)))
    computed = []
    for number in common:
        of_ranks = [_on_one_clock(rank, of_rank[number]) for rank, of_rank in zip(ranks, recorded, strict=True)]
        if any(rank.blocks for rank in of_ranks):
            computed.append(Step(number, tuple(of_ranks)))
    if not computed:
        shown = []
        for rank in ranks[:8]:
            numbers = [step.number for step in rank.steps]
            shown.append(f"rank {rank.rank}: {_ranges(numbers)}")
        raise ConfigError(
            f"there is no step in which all ranks recorded what they computed ({'; '.join(shown)}); ranks that ended at "
            "different steps keep different ones: run again with a larger SMP_TIMELINE, the number of newest steps to keep",
            code="SMP116",
        )
    return tuple(computed)


def _on_one_clock(rank: RankTimeline, step: StepTimeline) -> RankStep:
    # Each rank has measured by the clock of its host; the offset leads to a common one.
    blocks = [
        Block(rank.names[name], kind, microbatch, rank.paths[path], start + rank.offset, stop + rank.offset)
        for name, kind, microbatch, path, start, stop in step.actions
    ]
    return RankStep(
        rank=rank.rank,
        stage=rank.stage,
        replica=rank.replica,
        host=rank.host,
        start=step.start + rank.offset,
        stop=step.stop + rank.offset,
        blocks=tuple(sorted(blocks, key=lambda block: (block.start, block.stop))),
        failed=step.failed,
    )


def _ranges(numbers: list[int]) -> str:
    """Return numbers as ranges, ``1–3, 7``; ``none`` if there are none."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    if not parts:
        return "none"
    shown = []
    for first, last in parts:
        shown.append(f"{first}–{last}" if last > first else str(first))
    return ", ".join(shown)
