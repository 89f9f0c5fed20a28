"""A rank of ``smp-estimator verify --plain``: ``python run.py - train.py --epochs 3``, started by ``smp_launch run``.

The first word is the name of the script's function that returns batches, or a hyphen. The script runs as it is. Before it, hooks
of PyTorch are installed that record numbers, keep or replace the batches, and end the script after the wanted updates.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from smp_config.machine.collective_backends import HOST_BACKEND
from smp_records.numerics import VARIABLE, Trial
from smp_records.plain_job import NO_FUNCTION
from smp_runtime.errors import SMPUserError
from smp_tools.numerics.plain.batch_functions import BatchFunction, run_with_batches
from smp_tools.numerics.plain.batches import JoinedBatches, RankBatches
from smp_tools.numerics.plain.recorder import PlainRank, PlainRecorder
from smp_tools.numerics.plain.ties import ParameterTies
from smp_tools.numerics.trial import seed_everything

#: Seconds for the script to come from its last recorded update to the samples of the next epoch.
_SECOND_EPOCH = 60.0


class PlainRun:
    """The script of this rank, and what is installed before it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        trial = Trial.from_environment(environ)
        if trial is None:
            raise SMPUserError(
                "run.py runs a script for smp-estimator verify --plain: call that command", code="SMP317"
            )
        self._trial, self._folder = trial, Path(environ[VARIABLE])
        self._place = PlainRank(int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1")))
        self._ties = ParameterTies()
        self._recorder = PlainRecorder(self._place, self._folder, trial, self._ties, self._finished)
        self._batches = self._find_batches(environ)
        self._recorder.facts.loaders = self._batches.book.facts
        self._has_batch_function = False

    def _find_batches(self, environ: Mapping[str, str]) -> RankBatches | JoinedBatches:
        if self._trial.replay:
            return JoinedBatches(Path(self._trial.replay))
        recorder = self._recorder
        return RankBatches(
            Path(self._trial.save), self._place.rank, lambda: recorder.updates, self._trial.steps, self._end
        )

    def run(self, script: str, words: list[str], batches: str = "") -> None:
        """Run the script to its end, or to the last update that is wanted.

        Args:
            batches: name of the script's function that returns batches, if it reads them from no ``DataLoader``.
        """
        self._has_batch_function = bool(batches)
        self._install()
        sys.argv = [script, *words]
        sys.path[0] = str(Path(script).absolute().parent)
        # Ranks without a seed of their own must not draw the same weights: in a real job they would not.
        seed_everything(self._trial.seed + self._place.rank)
        try:
            if batches:
                run_with_batches(script, batches, self._follow_function)
            else:
                runpy.run_path(script, run_name="__main__")
        except Exception as error:
            # The next epoch begins too early for some scripts: all numbers are written by then.
            if not self._recorder.is_over:
                raise
            self._recorder.facts.end = f"{type(error).__name__}: {error}"[:300]
        self._recorder.facts.write(self._folder)

    def _finished(self) -> None:
        """Go on to the order of the next epoch, which only the ranks show."""
        if self._trial.replay or self._has_batch_function:
            self._end()
        # A daemon: a script that ends without a second epoch must not wait for it.
        timer = threading.Timer(_SECOND_EPOCH, self._give_up)
        timer.daemon = True
        timer.start()

    def _give_up(self) -> None:
        self._recorder.facts.end = f"no second epoch began within {_SECOND_EPOCH:g} seconds"
        self._recorder.facts.write(self._folder)
        # From the timer's thread: an exception would not end the script.
        os._exit(0)

    def _end(self) -> None:
        self._recorder.facts.write(self._folder)
        sys.exit(0)

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        recorder = self._recorder
        self._ties.begin()
        # This hook has no keyword arguments. Of a model without DDP, its first call is recorded without them.
        register_module_forward_pre_hook(lambda module, args: recorder.called(module, args, {}))
        register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: recorder.before_update(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: recorder.after_update(optimizer))
        self._follow_backward()
        self._follow_loaders()
        self._follow_loss_scale()
        self._follow_clipping()
        _use_gloo()
        _write_no_files()

    def _follow_backward(self) -> None:
        original, recorder = torch.autograd.backward, self._recorder

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            recorder.backward(lambda: original(tensors, *args, **kwargs), tensors)

        torch.autograd.backward = backward

    def _follow_loaders(self) -> None:
        made, iterate, length = DataLoader.__init__, DataLoader.__iter__, DataLoader.__len__
        batches, replays = self._batches, bool(self._trial.replay)

        @functools.wraps(made)
        def __init__(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:  # noqa: N807 - takes the place of DataLoader's
            made(loader, *args, **kwargs)
            batches.book.number(loader)

        def __iter__(loader: DataLoader[Any]) -> Iterator[Any]:  # noqa: N807 - takes the place of DataLoader's
            return batches.iterate(loader, iter(()) if replays else iterate(loader))

        def __len__(loader: DataLoader[Any]) -> int:  # noqa: N807 - takes the place of DataLoader's
            return batches.length(loader, length(loader))

        DataLoader.__init__ = __init__  # type: ignore[method-assign,assignment]
        DataLoader.__iter__ = __iter__  # type: ignore[method-assign,assignment]
        DataLoader.__len__ = __len__  # type: ignore[method-assign]

    def _follow_function(self, function: Callable[..., Any]) -> BatchFunction:
        return BatchFunction(function, self._batches, replays=bool(self._trial.replay))

    def _follow_clipping(self) -> None:
        original, recorder = torch.nn.utils.clip_grad_norm_, self._recorder

        @functools.wraps(original)
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> torch.Tensor:
            norm = original(*args, **kwargs)
            recorder.clipped(norm)
            return norm

        torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = clip_grad_norm_

    def _follow_loss_scale(self) -> None:
        original, facts = torch.amp.GradScaler.scale, self._recorder.facts

        def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            facts.has_loss_scale = facts.has_loss_scale or scaler.is_enabled()
            return original(scaler, outputs)

        torch.amp.GradScaler.scale = scale  # type: ignore[method-assign,assignment]


def _use_gloo() -> None:
    """Let ranks meet over gloo, whatever backend the script names, if there is no GPU."""
    if torch.cuda.is_available():
        return
    original = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        original(HOST_BACKEND, *args, **kwargs)

    dist.init_process_group = init_process_group


def _write_no_files() -> None:
    """Keep the script from writing checkpoints over the user's."""

    def save(*args: Any, **kwargs: Any) -> None:
        """Write nothing."""

    torch.save = save


if __name__ == "__main__":
    PlainRun(os.environ).run(sys.argv[2], sys.argv[3:], "" if sys.argv[1] == NO_FUNCTION else sys.argv[1])
