"""The throughput and cost of a training, from a step's timeline: samples and tokens per second, idle share, hours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_config import ConfigError
from smp_estimator.planning.step_time import StepCost, Training

if TYPE_CHECKING:
    from smp_estimator.timeline.steps import JobTimeline


@dataclass(frozen=True)
class Throughput:
    """The throughput of a timeline's steps, on all instances of the job.

    Attributes:
        seconds: from one update to the next.
        makespan: of these, from the first block of the pipeline to the last.
        idle: part of the makespan in which a rank computed nothing, the mean of the ranks.
        global_batch: samples per step, of the whole job.
        sequence: tokens per sample; None where samples are no texts.
        instance_count: of the job.
        usd_per_hour: of one instance; None where no price is known.
        is_given: the price is the user's, not the catalogue's.
    """

    seconds: float
    makespan: float
    idle: float
    global_batch: int
    sequence: int | None = None
    instance_count: int = 1
    usd_per_hour: float | None = None
    is_given: bool = False

    @classmethod
    def of(
        cls,
        timeline: JobTimeline,
        global_batch: int,
        *,
        sequence: int | None = None,
        instance_count: int = 1,
        usd_per_hour: float | None = None,
        is_given: bool = False,
    ) -> Throughput:
        """Return the throughput of the training step of median makespan; see :func:`seconds_per_step`.

        Raises:
            ConfigError: no training step was recorded, or only one of length zero.
        """
        step = timeline.step()
        if not step.trains or step.makespan <= 0:
            raise ConfigError(
                f"the timeline of {timeline.job or 'the job'} has no training step of any length ({len(timeline.steps)} steps were "
                "recorded by every rank); samples per second are those of steps with a backward pass: record some",
                code="SMP116",
            )
        return cls(
            seconds=seconds_per_step(timeline),
            makespan=step.makespan,
            idle=step.idle,
            global_batch=global_batch,
            sequence=sequence,
            instance_count=instance_count,
            usd_per_hour=usd_per_hour,
            is_given=is_given,
        )

    @property
    def samples_per_second(self) -> float:
        """Return the samples per second of the whole job."""
        return self.global_batch / self.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Return the tokens per second of the whole job; None if samples are not texts."""
        return None if self.sequence is None else self.samples_per_second * self.sequence

    @property
    def cost(self) -> StepCost | None:
        """Return the cost of a step; None without a price. If samples are not texts, each counts as one token."""
        if self.usd_per_hour is None:
            return None
        tokens = self.global_batch * (self.sequence or 1)
        return StepCost(self.usd_per_hour, self.instance_count, self.is_given, self.seconds, tokens)

    def training(
        self, *, steps: int | None = None, epochs: float | None = None, samples: int | None = None
    ) -> Training:
        """Return the duration and the cost of a whole training.

        Args:
            steps: optimizer steps; or
            epochs: passes through ``samples``; each pass drops the last samples that do not fill a global batch.

        Raises:
            ConfigError: neither or both, epochs without ``samples``, or fewer samples than a step reads.
        """
        if (steps is None) == (epochs is None):
            raise ConfigError(
                f"steps is {steps} and epochs is {epochs}; each says when the training ends: give one of the two",
                code="SMP116",
            )
        per_epoch = None if samples is None else samples // self.global_batch
        if epochs is not None:
            if per_epoch is None:
                raise ConfigError(
                    f"epochs is {epochs}, but nothing says how many samples an epoch has; give samples, of the data set, or steps",
                    code="SMP116",
                )
            if per_epoch < 1:
                raise ConfigError(
                    f"{samples:,} samples are fewer than the {self.global_batch:,} that a step reads, so an epoch has no whole "
                    "step; lower the batch, or give more samples",
                    code="SMP116",
                )
            steps = round(epochs * per_epoch)
        elif per_epoch:
            epochs = (steps or 0) / per_epoch
        usd = None if self.cost is None else self.cost.usd_per_step
        return Training(steps or 0, epochs, self.seconds, False, usd)

    def to_dict(self) -> dict[str, float | int | None]:
        """Return the numbers by name: seconds, parts of 1, per second, US dollars."""
        return {
            "seconds_per_step": self.seconds,
            "makespan": self.makespan,
            "idle": self.idle,
            "global_batch": self.global_batch,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "usd_per_step": None if self.cost is None else self.cost.usd_per_step,
        }

    def lines(self) -> list[str]:
        """Return lines of text: the step's time, the throughput, and the cost."""
        tokens = "" if self.tokens_per_second is None else f", {self.tokens_per_second:,.0f} tokens per second"
        said = [
            f"{self.seconds:.3g} s per step, {self.makespan:.3g} of them in the pipeline, of which ranks wait {self.idle:.1%}",
            f"{self.samples_per_second:,.4g} samples per second{tokens}",
        ]
        if self.cost is not None:
            price = f"{self.instance_count} × {self.usd_per_hour:g} USD per hour{' (given)' if self.is_given else ''}"
            each = f", {self.cost.usd_per_million_tokens:.3g} per million tokens" if self.sequence is not None else ""
            said.append(f"{self.cost.usd_per_step:.3g} USD per step{each}: {price}")
        return said


def seconds_per_step(timeline: JobTimeline) -> float:
    """Return the seconds from one update to the next: the median distance of consecutive training steps' starts.

    The result includes the update, data loading and the script's other work between two calls of the step
    function. With a single training step, it is the time of that call on the slowest rank.
    """
    # A step has begun when its last rank has.
    begins = {step.number: max(rank.start for rank in step.ranks) for step in timeline.steps if step.trains}
    distances = []
    for number, begin in begins.items():
        following = begins.get(number + 1)
        if following is not None:
            distances.append(following - begin)
    if distances:
        distances.sort()
        # The lower of two in the middle: a time that was measured, and no mean of two.
        return distances[(len(distances) - 1) // 2]
    step = timeline.step()
    return max(rank.stop - rank.start for rank in step.ranks)


__all__ = ["Throughput", "seconds_per_step"]
