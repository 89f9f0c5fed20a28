"""PyTorch's profiler over some steps of this rank, with a mark by which its times and those of other ranks become one clock's."""

from __future__ import annotations

import gzip
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from smp_config import Group
from smp_records.profiling import ABOUT, CLOCK_MARK, FILE_PREFIX, MEMORY_SUFFIX, About, Profile, file_name
from smp_runtime.pipeline.observe.recorder import SharedClock, share_clock
from smp_runtime.tensors.torch_private import of_all_threads, record_memory_history, write_memory_history

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.job.trained import TrainedOptimizer

logger = logging.getLogger("smp")

#: Moments by which the profiler's clock is compared with the rank's own; the one that took least time counts.
_MARKS = 8

#: Names the folder that the platform keeps at the job's end.
_FOLDER_VARIABLE = "SM_OUTPUT_DATA_DIR"


class RankProfile:
    """The profile of this rank; it ends after its last step, or with the job.

    Args:
        wanted: the steps, and the contents of the profile.
        clock: the clock that the ranks agreed on.
    """

    outlives_regrouping = True

    def __init__(self, session: Session, wanted: Profile, clock: SharedClock, environ: Mapping[str, str]) -> None:
        self._session, self._wanted, self._clock = session, wanted, clock
        self._folder = Path(environ.get(_FOLDER_VARIABLE, "."))
        self._host = environ.get("SMP_HOST") or environ.get("SM_CURRENT_HOST") or socket.gethostname()
        self._running: Any = None
        self._marks: list[tuple[float, float]] = []
        session.before_step.append(self._step_begins)
        session.after_update.append(self._updated)
        session.at_close.append(self.close)

    def _step_begins(self) -> None:
        if self._wanted.first == 1 and self._session.progress.step == 0:
            self._begin()

    def _updated(self, optimizer: TrainedOptimizer) -> None:
        del optimizer
        done = self._session.progress.step
        if done >= self._wanted.last:
            self.close()
        elif done >= self._wanted.first - 1:
            self._begin()

    def _begin(self) -> None:
        if self._running is not None or self._wanted.last <= self._session.progress.step:
            return
        on_gpu = self._session.ranks.device.type == "cuda"
        if self._wanted.memory and on_gpu:
            record_memory_history()
        self._running = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            record_shapes=self._wanted.shapes,
            profile_memory=self._wanted.memory,
            with_stack=self._wanted.stacks,
            # Allocations are not recorded then; the stages of a pipeline compute on threads of their own.
            experimental_config=of_all_threads() if self._session.ranks.size(Group.PP) > 1 else None,
        )
        self._running.start()
        self._marks = [_marked(number) for number in range(_MARKS)]

    def close(self) -> None:
        """Write what was recorded; a file that cannot be written costs a warning, not the job."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            if not self._session.has_failed and self._session.ranks.device.type == "cuda":
                torch.cuda.synchronize(self._session.ranks.device)  # kernels of the last step belong to it
            running.stop()
            self._write(running)
        except Exception as error:  # a profile that cannot be written must not end the training
            logger.warning(
                "rank %d: the profile cannot be written to %s: %s", self._session.ranks.rank, self._folder, error
            )

    def _write(self, running: Any) -> None:
        ranks = self._session.ranks
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._wanted.memory and ranks.device.type == "cuda":
            write_memory_history(self._folder / f"{FILE_PREFIX}{ranks.rank:05}{MEMORY_SUFFIX}")
        about = About(
            job=self._clock.job,
            rank=ranks.rank,
            stage=ranks.rank_in(Group.PP),
            host=self._host,
            first=self._wanted.first,
            last=min(self._wanted.last, self._session.progress.step),
            offset=self._clock.offset,
            offset_error=self._clock.error,
            marks=self._marks,
        )
        target = self._folder / file_name(ranks.rank)
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder, "trace.json")
            running.export_chrome_trace(str(plain))
            content = json.loads(plain.read_text(encoding="utf-8", errors="replace"))
        content[ABOUT] = about.model_dump()
        partial = self._folder / f".{target.name}.{os.getpid()}"
        try:
            with gzip.open(partial, "wt", encoding="utf-8", compresslevel=5) as file:
                json.dump(content, file)
            # At once, so that a reader never finds half of a profile.
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
        logger.info("rank %d: steps %d to %d are profiled in %s", ranks.rank, about.first, about.last, target)


def _marked(number: int) -> tuple[float, float]:
    """Make a mark, and return this rank's clock before and after its beginning, which takes long the first time."""
    before = time.perf_counter()
    with record_function(f"{CLOCK_MARK}{number}"):
        return before, time.perf_counter()


def begin_profile(session: Session, environ: Mapping[str, str]) -> None:
    """Profile this rank if the environment requests it; every rank must call this, because they agree on a clock.

    Raises:
        ConfigError: ``SMP_PROFILE`` has an invalid value.
    """
    wanted = Profile.of(environ)
    if wanted is None:
        return
    clock = share_clock(session.ranks.control)
    if wanted.takes(session.ranks.rank):
        session.ranks.keep(RankProfile, lambda: RankProfile(session, wanted, clock, environ))
