"""How far the training is: one structured line a second from rank 0, read by ``fit()`` wherever the job runs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping

import torch

from smp_config.records import ProgressRecord, format_progress
from smp_runtime.comm.devices import peak_memory_bytes

#: Hyperparameters by which scripts commonly name the number of optimizer steps.
TOTAL_STEPS_NAMES = "max_steps steps num_steps total_steps train_steps num_train_steps max_train_steps".split()

_SECONDS_BETWEEN_LINES = 1.0


class ProgressReporter:
    """Counts optimizer steps and samples, and prints a progress line at most once a second.

    Scripts need no change: the step and the wrapped optimizer report here. Reading the loss of a step waits for
    the device, so it happens only when a line is due.

    Args:
        enabled: False makes every method do nothing (all ranks but one).
        total_steps: optimizer steps of the whole job, None when unknown.
        device: whose memory is reported.
    """

    def __init__(self, *, enabled: bool, total_steps: int | None = None, device: torch.device | None = None) -> None:
        self.enabled = enabled
        self.total_steps = total_steps
        self.step = 0
        self._device = device or torch.device("cpu")
        self._losses: list[torch.Tensor] = []
        self._eval_loss: float | None = None
        self._pending_samples = 0
        self._samples = 0
        self._started: float | None = None
        self._printed_at = float("-inf")
        self._window = (0, 0.0)

    @classmethod
    def from_environment(
        cls, *, enabled: bool, device: torch.device, environ: Mapping[str, str] | None = None
    ) -> ProgressReporter:
        """A reporter that takes the number of steps from the job's hyperparameters, where they name it."""
        environ = os.environ if environ is None else environ
        total = None
        try:
            hyperparameters = json.loads(environ.get("SM_HPS", "{}"))
        except json.JSONDecodeError:
            hyperparameters = {}
        for name in TOTAL_STEPS_NAMES:
            try:
                found = int(hyperparameters[name])
            except (KeyError, TypeError, ValueError):
                continue
            if found > 0:  # -1 often means "until the data ends"
                total = found
                break
        return cls(enabled=enabled and "SM_HPS" in environ, total_steps=total, device=device)

    def set_position(self, step: int, total_steps: int | None = None) -> None:
        """Tell where a resumed job stands, and how long it will be."""
        self.step = step
        self.total_steps = self.total_steps if total_steps is None else total_steps

    def step_begins(self) -> None:
        """The clock starts with the first step, so that building the model does not count as training."""
        if self.enabled and self._started is None:
            self._started = time.monotonic()
            self._window = (0, self._started)

    def note_samples(self, samples: int) -> None:
        """Samples, over all data parallel ranks, that the next optimizer step consumed."""
        if self.enabled:
            self._pending_samples += samples

    def note_loss(self, outputs: list[torch.Tensor]) -> None:
        """The microbatches' losses of a training step; not read until a line is due."""
        if self.enabled:
            self._losses = [output.detach() for output in outputs]

    def note_eval_loss(self, loss: float) -> None:
        """The latest held-out loss, shown from the next line on."""
        self._eval_loss = loss

    def optimizer_stepped(self) -> None:
        """Count a step; print a line when a second has passed, and always for the first and the last step."""
        self.step += 1
        if not self.enabled:
            return
        self._samples += self._pending_samples
        self._pending_samples = 0
        now = time.monotonic()
        last = self.total_steps is not None and self.step == self.total_steps
        if now - self._printed_at >= _SECONDS_BETWEEN_LINES or last:
            self._print(now)

    def _print(self, now: float) -> None:
        samples_before, then = self._window
        rate = (self._samples - samples_before) / (now - then) if self._started is not None and now > then else None
        record = ProgressRecord(
            step=self.step,
            total_steps=self.total_steps,
            loss=float(torch.stack([loss.float() for loss in self._losses]).mean()) if self._losses else None,
            eval_loss=self._eval_loss,
            samples_per_second=rate or None,
            elapsed_seconds=now - (self._started or now),
            memory_bytes=peak_memory_bytes(self._device),
        )
        self._window = (self._samples, now)
        self._printed_at = now
        sys.stdout.write(format_progress(record) + "\n")
        sys.stdout.flush()
