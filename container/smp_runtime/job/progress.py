"""Progress of the training: one structured line a second from rank 0, read by ``fit()`` wherever the job runs.

At the end rank 0 prints a last one, and every rank the resources that it has used.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from smp_runtime.comm.devices import peak_memory_bytes

#: Hyperparameters by which scripts commonly name the number of optimizer steps.
TOTAL_STEPS_NAMES = "max_steps steps num_steps total_steps train_steps num_train_steps max_train_steps".split()

_SECONDS_BETWEEN_LINES = 1.0


class Update(NamedTuple):
    """An update of an optimizer.

    Attributes:
        step: number of updates so far, including this one.
        samples: samples of the global batch since the previous update.
        losses: losses of the microbatches of the newest training step, without their graph; not read yet.
    """

    step: int
    samples: int
    losses: list[torch.Tensor]


class ProgressReporter:
    """A counter of optimizer steps and samples that prints a progress line at most once a second.

    Scripts need no change: the step and the wrapped optimizer report here. Reading the loss of a step waits for
    the device, so it happens only when a line is due.

    Args:
        enabled: False prints no progress lines (all ranks but one).
        total_steps: optimizer steps of the whole job, or None if unknown.
        device: the device for which memory is reported.
        rank: the rank for which usage is reported at the end; None reports nothing.

    Attributes:
        heard: functions called with each update, before its line.
        more: returns further fields of a line, given its samples per second.
    """

    def __init__(
        self,
        *,
        enabled: bool,
        total_steps: int | None = None,
        device: torch.device | None = None,
        rank: int | None = None,
    ) -> None:
        self.enabled = enabled
        self.total_steps = total_steps
        self.step = 0
        self.heard: list[Callable[[Update], None]] = []
        self.more: Callable[[float], Mapping[str, object]] = _nothing_more
        self._device = device or torch.device("cpu")
        self._rank = rank
        self._joined = time.monotonic(), processor_seconds()
        self._printed_step = 0
        self._stepped_at = 0.0
        self._losses: list[torch.Tensor] = []
        self._eval_loss: float | None = None
        self._pending_samples = 0
        self._samples = 0
        self._started: float | None = None
        self._printed_at = float("-inf")
        self._window = (0, 0.0)

    @classmethod
    def from_environment(
        cls, *, enabled: bool, device: torch.device, environ: Mapping[str, str] | None = None, rank: int = 0
    ) -> ProgressReporter:
        """Return a reporter with the number of steps from the hyperparameters or the command line, if given there."""
        environ = os.environ if environ is None else environ
        try:
            hyperparameters = json.loads(environ.get("SM_HPS", "{}"))
        except json.JSONDecodeError:
            hyperparameters = {}
        total = _total_steps(hyperparameters) or _total_steps(_named(sys.argv[1:]))
        in_job = "SM_HPS" in environ
        return cls(enabled=enabled and in_job, total_steps=total, device=device, rank=rank if in_job else None)

    def set_position(self, step: int, total_steps: int | None = None) -> None:
        """Set the current step of a resumed job, and its total number of steps.

        ``resume_from_checkpoint`` sets the current step.
        """
        self.step = self._printed_step = step
        self.total_steps = self.total_steps if total_steps is None else total_steps

    def step_begins(self) -> None:
        """Start the clock with the first step, so that building the model does not count as training."""
        if self.enabled and self._started is None:
            self._started = time.monotonic()
            self._window = (0, self._started)

    def note_samples(self, samples: int) -> None:
        """Add samples, over all data parallel ranks, that the next optimizer step consumes."""
        if self.enabled or self.heard:
            self._pending_samples += samples

    def note_loss(self, outputs: list[torch.Tensor]) -> None:
        """Keep the microbatches' losses of a training step; they are not read until a line is due."""
        is_read = self.enabled or self.heard
        if is_read:
            self._losses = [output.detach() for output in outputs]

    def note_eval_loss(self, loss: float) -> None:
        """Set the latest held-out loss, which is shown from the next line on."""
        self._eval_loss = loss

    def optimizer_stepped(self) -> None:
        """Count a step; print a line when a second has passed, and always for the first and the last step."""
        self.step += 1
        update = Update(self.step, self._pending_samples, self._losses)
        self._pending_samples = 0
        for heard in self.heard:
            heard(update)
        if not self.enabled:
            return
        self._samples += update.samples
        self._stepped_at = now = time.monotonic()
        last = self.total_steps is not None and self.step == self.total_steps
        if now - self._printed_at >= _SECONDS_BETWEEN_LINES or last:
            self._print(now)

    def close(self, *, failed: bool = False) -> None:
        """Print the last step, if that was not done, and the resources that this rank has used.

        It is called when the rank leaves the job.

        Args:
            failed: an error ends the process. Then no loss is read, since its device might not answer.
        """
        if failed:
            self._losses = []
        with contextlib.suppress(Exception):  # nothing that is only shown may keep a rank from leaving
            self._print_rest()
        self.enabled, self._rank = False, None

    def _print_rest(self) -> None:
        if self.enabled and self.step != self._printed_step:
            self._print(self._stepped_at)
        if self._rank is not None:
            self._print_line(self._usage(self._rank))

    def _usage(self, rank: int) -> str:
        from smp_records.records import UsageRecord, format_usage

        since, before = self._joined
        elapsed = time.monotonic() - since
        cores = (processor_seconds() - before) / elapsed if elapsed > 0 else None
        return format_usage(UsageRecord(rank=rank, memory_bytes=peak_memory_bytes(self._device), cpu_cores=cores))

    def _print(self, now: float) -> None:
        from smp_records.records import ProgressRecord, format_progress

        samples_before, then = self._window
        rate = 0.0
        if self._started is not None and now > then:
            rate = (self._samples - samples_before) / (now - then)
        total_steps = self.total_steps
        # If a script goes beyond this number, it was not the number of its steps.
        if total_steps is not None and self.step > total_steps:
            total_steps = None
        loss = None
        if self._losses:
            losses = [loss.float() for loss in self._losses]
            loss = float(torch.stack(losses).mean())
        record = ProgressRecord(
            step=self.step,
            total_steps=total_steps,
            loss=loss,
            eval_loss=self._eval_loss,
            samples_per_second=rate or None,
            elapsed_seconds=now - (self._started or now),
            memory_bytes=peak_memory_bytes(self._device),
        ).model_copy(update=dict(self.more(rate)))
        self._window = (self._samples, now)
        self._printed_at, self._printed_step = now, self.step
        self._print_line(format_progress(record))

    @staticmethod
    def _print_line(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _nothing_more(_: float) -> Mapping[str, object]:
    return {}


def _total_steps(named: Mapping[str, object]) -> int | None:
    for name in TOTAL_STEPS_NAMES:
        try:
            found = int(named[name])  # type: ignore[call-overload]  # a value that is no number raises
        except (KeyError, TypeError, ValueError):
            continue
        if found > 0:  # -1 often means "until the data ends"
            return int(found)
    return None


def _named(words: Sequence[str]) -> dict[str, object]:
    """Return the values of ``--name value`` and ``--name=value`` on a command line, by name.

    Hyphens in names become underscores.
    """
    found: dict[str, object] = {}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, sign, value = word.partition("=")
        if name.startswith("--"):
            found[name[2:].replace("-", "_")] = value if sign else following
    return found


def processor_seconds() -> float:
    """Return the CPU seconds used by this process with all its threads, and by its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)
