"""The numbers of a training after each update, without a wait for the device, and their receivers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_config.machine.gpus import gpus
from smp_records import time_breakdown
from smp_records.rank_record import current_record
from smp_tools.tracking.points import LaterPoint, Number, finite_or_none

if TYPE_CHECKING:
    from smp_runtime.job.progress import Update
    from smp_runtime.job.session import Session
    from smp_tools.tracking.writer import Writer

#: Operations per parameter and token of a forward and a backward pass (Kaplan et al. 2020, section 2.1), attention left out.
_OPERATIONS = 6


class UpdateTracker:
    """Makes points out of updates, on the rank that writes.

    Args:
        writer: gets them; None where only the log's lines do.
        every: updates from one point to the next.
        peak: 10^12 operations per second of a device; None: as published for the GPU, if it is one that is known.
    """

    outlives_regrouping = True

    def __init__(self, session: Session, writer: Writer | None, every: int, peak: float | None = None) -> None:
        self._session, self._writer, self._every = session, writer, every
        self._peak = peak if peak is not None else _published_peak(session)
        self._rates = _Rates()
        self._tokens_per_sample = 0.0
        self._own: dict[str, Number] = {}  # the script's, of the step that is the newest
        self._own_step = 0
        self._newest: dict[str, float] = {}  # what optimizers had in the newest update
        self._read = current_record().pace.read()
        self._saved = self._read.seconds[time_breakdown.SAVE]
        self._save_seconds: float | None = None  # of the newest save, until a point has it
        self._last_save: float | None = None
        self._parameters: int | None = None
        session.progress.heard.append(self.heard)
        session.progress.more = self.more
        session.arguments.append(self._look_at)
        session.at_close.append(self.close)

    def log(self, values: Mapping[str, Number], step: int) -> None:
        """Log values of the script's own."""
        self._own = {**(self._own if step == self._own_step else {}), **values}
        self._own_step = step
        if self._writer is not None:
            self._writer.put(LaterPoint(step, time.time(), values))

    def heard(self, update: Update) -> None:
        """Make a point after an optimizer update, if it is time for one."""
        self._rates.add(update.samples)
        self._newest = self._of_optimizers()
        saved = current_record().pace.read().seconds[time_breakdown.SAVE]
        if saved > self._saved:
            self._save_seconds = self._last_save = saved - self._saved
            self._saved = saved
        if self._writer is None or (update.step % self._every and update.step != 1):
            return
        values: dict[str, Number] = {}
        if update.losses:
            values["loss"] = torch.stack([loss.float() for loss in update.losses]).mean()
        values.update(self._newest)
        values.update(self._throughput(self._rates.take()))
        if self._save_seconds is not None:
            values["checkpoint_seconds"], self._save_seconds = self._save_seconds, None
        self._writer.put(LaterPoint(update.step, time.time(), values))

    def more(self, samples_per_second: float) -> dict[str, Any]:
        """Return additional fields for the line of the log that is about to be printed.

        Args:
            samples_per_second: the line's own; 0 if it has none.
        """
        found: dict[str, Any] = {
            name: finite_or_none(value)
            for name, value in {**self._newest, **self._throughput(samples_per_second)}.items()
            if name in ("learning_rate", "gradient_norm", "loss_scale", "tokens_per_second", "mfu")
        }
        before, self._read = self._read, current_record().pace.read()
        told = time_breakdown.record_between(before, self._read, self._session.ranks.rank)
        if told.seconds:
            found["idle_share"] = idle_share(told)
        if self._last_save is not None:
            found["checkpoint_seconds"] = self._last_save
        if self._own and not self._session.has_failed:  # then the device may not answer
            # A line is printed once a second at most, and waits for the loss anyway.
            own = {name: finite_or_none(float(value)) for name, value in self._own.items()}
            found["values"] = {name: value for name, value in own.items() if value is not None} or None
        return found

    def close(self) -> None:
        """Close the writer when the job ends."""
        if self._writer is not None:
            self._writer.close(failed=self._session.has_failed)

    # -- values of an update ---------------------------------------------------------------------------------------

    def _look_at(self, values: list[Any], axes: list[int | None]) -> list[Any]:
        """Count the tokens of a sample: elements of the first integer argument with more than one axis."""
        for value, axis in zip(values, axes, strict=True):
            if axis is not None and _has_tokens(value):
                samples = max(1, value.shape[axis])
                self._tokens_per_sample = value.numel() / samples
                break
        return values

    def _of_optimizers(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for number, optimizer in enumerate(self._session.optimizers):
            kind = f"/optimizer{number}" if number else ""
            for place, group in enumerate(optimizer.param_groups):
                rate = group.get("lr")
                # The host would wait for the device to read a rate that is there.
                is_on_device = isinstance(rate, torch.Tensor) and rate.device.type == "cuda"
                if rate is None or is_on_device:
                    continue
                suffix = f"/group{place}" if place else ""
                found[f"learning_rate{kind}{suffix}"] = float(rate)
            if optimizer.gradient_norm is not None:
                found["gradient_norm" + kind] = optimizer.gradient_norm
            if self._session.ranks.cfg.fp16:
                found["loss_scale" + kind] = optimizer.loss_scale
        return found

    def _throughput(self, samples: float) -> dict[str, float]:
        if not samples:
            return {}
        tokens = samples * self._tokens_per_sample
        found = {"samples_per_second": samples}
        if tokens:
            found["tokens_per_second"] = tokens
        if tokens and self._peak:
            devices = self._session.ranks.size(Group.WORLD)
            found["mfu"] = _OPERATIONS * self._count() * tokens / (1e12 * self._peak * devices)
        return found

    def _count(self) -> int:
        """Return the number of parameters of all models, on all ranks together, counting each once."""
        if self._parameters is None:
            self._parameters = sum(prod(record.shape) for record in self._session.records.values())
        return self._parameters


class _Rates:
    """Samples per second between two times at which they are taken."""

    def __init__(self) -> None:
        self._samples = 0
        self._since: float | None = None

    def add(self, samples: int) -> None:
        self._samples += samples
        if self._since is None:  # what came before the first update was building, and is no measure
            self._since, self._samples = time.monotonic(), 0

    def take(self) -> float:
        """Return the samples per second since the last call, or 0."""
        now = time.monotonic()
        if self._since is None or not self._samples or now <= self._since:
            return 0.0
        found = self._samples / (now - self._since)
        self._samples, self._since = 0, now
        return found


def idle_share(record: time_breakdown.PaceRecord) -> float:
    """Return the fraction of a rank's time in which it waited for its pipeline, for collectives or for others."""
    return min(1.0, (record.waiting + record.collectives) / record.seconds) if record.seconds else 0.0


def _has_tokens(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return value.dim() > 1 and not _has_fractions(value)


def _has_fractions(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex() or value.dtype is torch.bool


def _published_peak(session: Session) -> float | None:
    """Return the published peak rate of this rank's GPU for the job's data type, in 10^12 operations per second.

    Return None if the device is not a known GPU.
    """
    device, cfg = session.ranks.device, session.ranks.cfg
    if device.type != "cuda":
        return None
    words = _words(torch.cuda.get_device_name(device))
    known = [gpu for gpu in gpus() if _words(gpu.name) <= words]
    if not known:
        return None
    best = max(known, key=lambda gpu: len(gpu.name))
    if cfg.bf16:
        return best.tflops("bf16")
    return best.tflops("fp16" if cfg.fp16 else "fp32")


def _words(name: str) -> set[str]:
    return set(name.upper().replace("-", " ").split())
