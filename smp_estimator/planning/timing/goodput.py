"""The hours of a training with failures: a discrete simulation of work, checkpoints, failures and restarts.

A job works, and pauses for a moment at each checkpoint, which is written while it goes on. Failures come at random (exponentially)
at a rate for each GPU. A failure costs the work since the last checkpoint that was whole, and a restart; another failure may
end a restart too. The loop goes from failure to failure, so a run of two months takes milliseconds.

If checkpoints are written in the pause itself, the expected time has a closed form (Daly 2006):
``M·e^(R/M)·(e^((τ + δ)/M) − 1)·W/τ`` for work W, interval τ, pause δ, restart R and M seconds between failures.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass
from typing import Any

from smp_config import ConfigError

_HOUR = 3600.0

#: Failures per GPU and hour: 419 unexpected interruptions of 16,384 H100 in 54 days (Llama Team 2024, "The Llama 3 Herd of Models",
#: section 3.3.4).
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16_384)

#: Seconds from a failure to the first step after it. An assumption: the same job trained for more than 90 % of its time, so each of
#: its 466 interruptions cost at most 1,000 s, with the work that was lost. Restarts in place of small jobs take 0.6 to 5.4 s.
RESTART_SECONDS = 600.0

#: Seconds that training waits for an asynchronous save. Measured on H100 and H200 with 4.3 GB: 0.1 to 0.4 s, later than the first.
PAUSE_SECONDS = 0.4

#: Bytes per second at which a rank writes its state: 4.3 GB took 5.3 to 7.1 s.
WRITE_RATE = 0.7e9

#: Simulated trainings.
RUNS = 200

#: Failures of one simulated training, at most: a longer one is made of equal parts, of which one is simulated.
MOST_FAILURES = 5000


@dataclass(frozen=True)
class JobFailures:
    """How often a job fails, and what its checkpoints and restarts take; all times are seconds.

    Attributes:
        between: mean time between two failures of the whole job.
        interval: of work between two checkpoints.
        pause: that training waits for one.
        writing: from the end of the pause until the checkpoint is whole.
        restart: from a failure to the first step after it.
    """

    between: float
    interval: float
    pause: float
    writing: float
    restart: float

    def __post_init__(self) -> None:
        for name in ("between", "interval", "pause", "writing", "restart"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (value == 0 and name in ("between", "interval")):
                raise ConfigError(
                    f"{name} is {value!r}; hours with failures are computed from it: give a number of seconds above 0",
                    code="SMP110",
                )

    def check_progress(self) -> None:
        """Raise ConfigError if the job hardly ever comes from one checkpoint to the next."""
        if (self.interval + self.pause + self.writing + self.restart) / self.between > 10:
            raise ConfigError(
                f"a failure is expected every {self.between:,.0f} s, and a checkpoint with its restart takes "
                f"{self.interval + self.writing + self.restart:,.0f} s, so the training makes hardly any progress; lower "
                "the interval between checkpoints, or use fewer GPUs",
                code="SMP110",
            )

    @classmethod
    def of_job(
        cls,
        gpus: int,
        state_bytes: float,
        *,
        rate: float | None = None,
        interval: float | None = None,
        restart: float | None = None,
    ) -> JobFailures:
        """Return the failures of a job.

        Args:
            state_bytes: that a rank writes.
            rate: failures per GPU and hour; default: those of the Llama 3 training.
            interval: seconds of work between checkpoints; default: the best by :func:`best_interval`.
            restart: seconds; default: :data:`RESTART_SECONDS`.
        """
        between = _HOUR / ((FAILURES_PER_GPU_HOUR if rate is None else rate) * gpus)
        writing = state_bytes / WRITE_RATE
        restart = RESTART_SECONDS if restart is None else restart
        # A checkpoint is whole before the next one begins.
        chosen = max(best_interval(PAUSE_SECONDS, between), writing) if interval is None else interval
        return cls(between, chosen, PAUSE_SECONDS, writing, restart)


@dataclass(frozen=True)
class Goodput:
    """The hours of a training with failures: the mean of simulated runs, and the range of nine in ten.

    Attributes:
        work: seconds of training without failures and checkpoints.
        seconds, low, high: with them.
        failures: of a run on average.
        usd_per_hour: of all instances; None if no price is known.
        model: the failures that were simulated.
        uncertainty: relative error of ``work``, which widens the range; 0 if it is not known.
    """

    work: float
    seconds: float
    low: float
    high: float
    failures: float
    usd_per_hour: float | None
    model: JobFailures
    uncertainty: float

    @property
    def part(self) -> float:
        """Return the part of the time in which the job makes progress."""
        return self.work / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers by name."""
        price = self.usd_per_hour
        usd = [None if price is None else price * each / _HOUR for each in (self.seconds, self.low, self.high)]
        return {
            "hours": self.seconds / _HOUR,
            "hours_range": [self.low / _HOUR, self.high / _HOUR],
            "usd": usd[0],
            "usd_range": usd[1:],
            "goodput": self.part,
            "failures": self.failures,
            "seconds_between_failures": self.model.between,
            "checkpoint_interval": self.model.interval,
            "restart_seconds": self.model.restart,
        }

    def __str__(self) -> str:
        hours = f"{self.seconds / _HOUR:,.1f} hours ({self.low / _HOUR:,.1f} to {self.high / _HOUR:,.1f})"
        money = ""
        if self.usd_per_hour is not None:
            usd = [self.usd_per_hour * each / _HOUR for each in (self.seconds, self.low, self.high)]
            money = f" and {usd[0]:,.0f} USD ({usd[1]:,.0f} to {usd[2]:,.0f})"
        model = self.model
        return (
            f"{hours}{money}: {self.failures:,.1f} failures, one in {model.between / _HOUR:,.1f} hours; a checkpoint every "
            f"{model.interval:,.0f} s, restarts of {model.restart:,.0f} s; {self.part:.1%} of the time is progress"
        )


def best_interval(pause: float, between: float) -> float:
    """Return the interval between checkpoints that costs least, as Daly 2006 gives it: Young's ``√(2δM)`` with higher terms."""
    if pause >= 2 * between:
        return between
    ratio = pause / (2 * between)
    return math.sqrt(2 * pause * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - pause


def expected_seconds(work: float, failures: JobFailures) -> float:
    """Return the expected time of a training whose checkpoints are written in their pauses, in closed form."""
    m, cycle = failures.between, failures.interval + failures.pause
    return m * math.exp(failures.restart / m) * math.expm1(cycle / m) * work / failures.interval


def simulated_seconds(work: float, failures: JobFailures, chance: random.Random) -> tuple[float, int]:
    """Return the time of one simulated training, and its failures.

    Args:
        work: seconds without failures and checkpoints.
    """
    cycle = failures.interval + failures.pause
    done = elapsed = 0.0
    count = 0
    while True:
        left = work - done
        # No checkpoint follows the last part.
        pauses = math.ceil(left / failures.interval) - 1
        ends = left + pauses * failures.pause
        lives = chance.expovariate(1 / failures.between)
        if lives >= ends:
            return elapsed + ends, count
        count += 1
        whole = min(pauses, max(0, math.floor((lives - failures.writing) / cycle)))
        done += whole * failures.interval
        elapsed += lives
        while (again := chance.expovariate(1 / failures.between)) < failures.restart:
            elapsed += again
            count += 1
        elapsed += failures.restart


def goodput(
    work: float, failures: JobFailures, *, usd_per_hour: float | None = None, uncertainty: float = 0.0, runs: int = RUNS
) -> Goodput:
    """Return the mean and the range of simulated trainings; the same arguments have the same result.

    Args:
        work: seconds of training without failures and checkpoints.
        usd_per_hour: of all instances.
        uncertainty: relative error of ``work``.

    Raises:
        ConfigError: the job hardly ever comes from one checkpoint to the next.
    """
    failures.check_progress()
    parts = math.ceil(expected_seconds(work, failures) / failures.between / MOST_FAILURES) or 1
    chance = random.Random(0)
    found = [simulated_seconds(work / parts, failures, chance) for _ in range(runs)]
    times = sorted(seconds for seconds, _ in found)
    mean, edge = statistics.fmean(times), runs // 20
    # Parts are independent of each other, so the range of their sum grows with the square root of their number.
    low, high = (parts * mean + math.sqrt(parts) * (times[end] - mean) for end in (edge, -1 - edge))
    return Goodput(
        work=work,
        seconds=parts * mean,
        low=low * (1 - uncertainty),
        high=high * (1 + uncertainty),
        failures=parts * statistics.fmean(count for _, count in found),
        usd_per_hour=usd_per_hour,
        model=failures,
        uncertainty=uncertainty,
    )
