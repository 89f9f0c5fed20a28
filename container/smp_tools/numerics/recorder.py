"""A recorder of the numbers that distinguish two trainings, in sampled steps.

It writes down weights, inputs, results, losses, gradients and updates.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_config.formats.secrets import masked_words
from smp_config.recovery import restart_count
from smp_records.numerics import (
    BUFFER,
    FORMAT_VERSION,
    GRADIENT,
    LOSS,
    LOSS_SCALE,
    PROJECTIONS,
    TRIAL_VARIABLE,
    UPDATE,
    WEIGHT,
    Closeup,
    Head,
    Start,
)
from smp_runtime.checkpoint.live_state import Updated, live_weights, updated_parameters
from smp_runtime.context.sequence import ShardedSequence
from smp_runtime.errors import SMPUserError
from smp_runtime.step.step import first_scalar
from smp_runtime.tensors.torch_private import NORMS_WITH_STATISTICS
from smp_tools.numerics.closeup import TensorFiles
from smp_tools.numerics.journal import Journal, ValueOwner, part_name
from smp_tools.numerics.module_watch import ModuleWatch, owner_of, owners_of
from smp_tools.numerics.sketch import Sketch, sketch_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from smp_runtime.checkpoint.files.tensor_regions import TensorRegion
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.job.session import Session
    from smp_runtime.job.trained import TrainedOptimizer
    from smp_runtime.model.distributed_model import DistributedModel


logger = logging.getLogger("smp")


def _contained(method: Callable[..., None]) -> Callable[..., None]:
    """Let a recorder's own errors end the recording, and never the training that calls it."""

    @functools.wraps(method)
    def run(self: NumericsRecorder, *args: Any, **kwargs: Any) -> None:
        if self.has_stopped:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.stop(error)

    return run


class NumericsRecorder:
    """Records every ``every``-th update and the step before it, on this rank; it sends nothing to others.

    An error of its own is logged, and ends the recording. The training goes on.

    Args:
        folder: all ranks may have the same one.
        every: updates from one recorded step to the next.
    """

    outlives_regrouping = True

    def __init__(self, session: Session, folder: Path, every: int, environ: Mapping[str, str]) -> None:
        self._session, self._every, self._environ = session, every, environ
        self._topology, self._head = session.ranks.topology, _head(session.ranks, every, environ)
        self._journal = Journal(folder, self._head)
        self._watches: list[ModuleWatch] = []
        self._position, self._call = -1, 0
        self._state_of = -1  # the last update with its weights written
        self._random = ""
        self._before: list[tuple[ValueOwner, Sketch]] = []
        self.has_stopped = False
        session.before_step.append(self.begin)
        session.after_step.append(self.end)
        session.before_update.append(self.before_update)
        session.after_update.append(self.after_update)
        session.at_close.append(self.close)
        asked = Closeup.from_environment(environ)
        # Behind the recorder, which has written when the script ends.
        self._closeup = None if asked is None else TensorFiles(session, asked)
        self.watch_models()

    @property
    def path(self) -> Path:
        """Return the path of this rank's file."""
        return self._journal.path

    @property
    def is_active(self) -> bool:
        """Return whether the current or next step is recorded."""
        return not self.has_stopped and self._session.progress.step % self._every == 0

    def stop(self, error: Exception) -> None:
        """Record nothing more on this rank, because of an error of the recorder."""
        if self.has_stopped:
            return
        self.has_stopped = True
        self._before = []
        self._journal.drop()
        logger.warning(
            "rank %d stops recording numbers at update %d because of an error in the recorder (%s: %s); the training goes on, and "
            "%s has the numbers before: compare these only, and report the error with the lines that follow",
            self._session.ranks.rank,
            self._session.progress.step,
            type(error).__name__,
            error,
            self.path,
            exc_info=error,
        )

    @_contained
    def watch_models(self) -> None:
        """Follow the modules of all wrapped models, also of those that were laid out anew."""
        models = self._models()
        if [
            watch for watch, model in zip(self._watches, models, strict=False) if not watch.watches(model.module)
        ] or len(self._watches) != len(models):
            for watch in self._watches:
                watch.remove()
            if self._session.ranks.topology is not self._topology:
                self._topology = self._session.ranks.topology
                self._head = _head(self._session.ranks, self._every, self._environ, self._head)
                self._journal.begin(self._head)
            self._watches = [
                ModuleWatch(
                    model.module,
                    model_prefix(number),
                    self._session.ranks,
                    lambda: self.is_active,
                    self._note,
                    self._gradient_factor,
                    self.stop,
                )
                for number, model in enumerate(models)
            ]

    # -- callbacks of the session ----------------------------------------------------------------------------------

    @_contained
    def begin(self) -> None:
        """Begin a step: drop values of a failed step, and note the state of the random generators."""
        position = self._session.progress.step
        self._call = self._call + 1 if position == self._position else 0
        self._position = position
        self.watch_models()
        self._journal.drop()  # of a step that failed
        for watch in self._watches:
            watch.begin()
        self._random = _digest_of_generators() if self.is_active else ""

    @_contained
    def end(self, result: Any) -> None:
        """End a step after the gradients were reduced: record its losses and write its numbers."""
        if not self.is_active:
            return
        for microbatch, output in enumerate(first_scalar(result)):
            self._note(ValueOwner(LOSS, "", 0, microbatch, owner_of(self._session.ranks)), output)
        self._add_state()
        self._journal.flush(self._position, self._call, self._random)

    @_contained
    @torch.no_grad()
    def before_update(self, optimizer: TrainedOptimizer) -> None:
        """Record the gradients as the optimizer will see them."""
        if not self.is_active:
            return
        if self._position != self._session.progress.step:  # a training without steps
            self._position, self._call = self._session.progress.step, 0
        self._add_state()
        scale = torch.full((2 + PROJECTIONS,), optimizer.loss_scale, dtype=torch.float64)
        self._journal.add(ValueOwner(LOSS_SCALE, ""), Sketch("float64", 1, 1, scale, torch.zeros(1, dtype=torch.int64)))
        for prefix, entry in self._updated(optimizer):
            tensor = entry.updated
            if tensor is None:
                continue
            part = part_name(entry.region)
            if tensor.grad is not None:
                place = ValueOwner(GRADIENT, prefix + entry.name, part=part)
                self._note(place, tensor.grad, region=entry.region, counts_small=True)
            place = ValueOwner(UPDATE, prefix + entry.name, part=part)
            self._before.append((place, sketch_of(tensor, entry.region, precise=True)))
            if self._closeup is not None:
                self._closeup.before_update((self._position, self._call), place, tensor)

    @_contained
    @torch.no_grad()
    def after_update(self, optimizer: TrainedOptimizer) -> None:
        """Record the updates that the optimizer has made; the session's count of updates is already the next one's."""
        if not self._before:
            return
        before, self._before = dict(self._before), []
        for prefix, entry in self._updated(optimizer):
            place = ValueOwner(UPDATE, prefix + entry.name, part=part_name(entry.region))
            if entry.updated is None or place not in before:
                continue
            self._journal.add(place, difference_of(sketch_of(entry.updated, entry.region, precise=True), before[place]))
            if self._closeup is not None:
                self._closeup.after_update((self._position, self._call), place, entry.updated, entry.region)
        self._journal.flush(self._position, self._call)
        for watch in self._watches:
            watch.begin()

    def close(self) -> None:
        """Close the file at the end of the job, and first write any numbers that a failed step has left."""
        self._write_rest()
        with contextlib.suppress(OSError):  # of a full disk, which the line above has logged
            self._journal.close()

    @_contained
    def _write_rest(self) -> None:
        self._journal.flush(max(self._position, 0), self._call, self._random)

    @_contained
    def _note(
        self,
        place: ValueOwner,
        tensor: torch.Tensor,
        factor: float = 1.0,
        *,
        region: TensorRegion | None = None,
        counts_small: bool = False,
    ) -> None:
        if isinstance(
            tensor, ShardedSequence
        ):  # once, not with each operation on it; all ranks of the sequence are here
            tensor = tensor.whole("record_numerics")
        self._journal.add(place, sketch_of(tensor, region, counts_small=counts_small), factor)
        if self._closeup is not None:
            self._closeup.keep((self._position, self._call), place, tensor, factor, region)

    # -- what there is ---------------------------------------------------------------------------------------------

    def _models(self) -> list[DistributedModel]:
        return self._session.models  # type: ignore[return-value]  # the one class of them

    def _updated(self, optimizer: TrainedOptimizer) -> Iterator[tuple[str, Updated]]:
        """Yield the parameters of each model that the optimizer updates on this rank, with the prefix of the model's names."""
        for number, model in enumerate(self._models()):
            try:
                found = updated_parameters(model, optimizer)  # type: ignore[arg-type]  # the one class of them
            except SMPUserError:  # another model's
                continue
            yield from ((model_prefix(number), entry) for entry in found)

    @torch.no_grad()
    def _add_state(self) -> None:
        """Record weights and buffers, once per update.

        A step does not change them, except for statistics of its own batch, which are left out.
        """
        if self._state_of == self._position:
            return
        self._state_of = self._position
        for number, model in enumerate(self._models()):
            prefix = model_prefix(number)
            for holding in live_weights(model):
                place = ValueOwner(WEIGHT, prefix + holding.name, part=part_name(holding.region))
                self._note(place, holding.tensor, region=holding.region)
            modules = dict(model.local_named_modules())
            for name, buffer in model.local_named_buffers():
                if not isinstance(modules.get(name.rpartition(".")[0]), NORMS_WITH_STATISTICS) and buffer.numel():
                    self._note(ValueOwner(BUFFER, prefix + name), buffer)

    def _gradient_factor(self) -> float:
        """Return the factor that turns this rank's gradients into those of the whole batch's mean loss.

        Backward on a rank computes the gradient of its own batch's loss, times the loss scale.
        """
        session = self._session
        averaged = owners_of(session.ranks) if session.ranks.cfg.ddp else 1
        scale = session.optimizer.loss_scale if session.optimizer is not None and session.ranks.cfg.fp16 else 1.0
        return 1.0 / (averaged * scale)


def model_prefix(number: int) -> str:
    """Return the prefix of names in the job's model with this number, counted from 0."""
    return "" if number == 0 else f"model {number + 1}: "


def difference_of(new: Sketch, old: Sketch) -> Sketch:
    """Return the sketch of an update.

    Projections are linear, so the old tensor is not needed. The norm is the expected one for these projections.
    """
    projections = new.numbers[2 : 2 + PROJECTIONS] - old.numbers[2 : 2 + PROJECTIONS]
    square = projections.square().mean().view(1)
    numbers = torch.cat([square, torch.zeros_like(square), projections])
    return replace(new, numbers=numbers, bits=new.bits - old.bits)


def _head(ranks: Ranks, every: int, environ: Mapping[str, str], former: Head | None = None) -> Head:
    """Return the description of this rank; ``former`` is its description at the degrees before."""
    coarse = ranks.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    groups = {"pp": Group.PP, "tp": Group.TP, "rdp": Group.RDP}
    context = {"cp": ranks.size(Group.CONTEXT)} if ranks.size(Group.CONTEXT) > 1 else {}
    return Head(
        numerics=FORMAT_VERSION,
        rank=ranks.rank,
        world=ranks.size(Group.WORLD),
        degrees={
            **{name: ranks.size(group) for name, group in groups.items()},
            "sharded": ranks.size(Group.SHARD),
            **context,
        },
        place={name: ranks.rank_in(group) for name, group in groups.items()},
        microbatches=ranks.cfg.microbatches,
        owners=owners_of(ranks),
        every=every,
        # TensorFloat-32 keeps ten bits of the fraction: half of the last one.
        rounding=2.0**-11 if coarse else 0.0,
        was_pipeline=ranks.size(Group.PP) > 1 or (former is not None and former.was_pipeline),
        restart=restart_count(environ),
        start=asdict(_start(ranks, environ)),
    )


def _start(ranks: Ranks, environ: Mapping[str, str]) -> Start:
    """Return how this rank's script was started, with secrets in its arguments masked."""
    file, *words = sys.argv or [""]
    script = Path(file).absolute()
    return Start(
        script=str(script) if script.is_file() else "",
        words=masked_words(words),
        directory=str(Path.cwd()),
        parameters=ranks.cfg.to_mp_parameters(),
        checkpoints=environ.get("SMP_CHECKPOINT_DIR", ""),
        trial=environ.get(TRIAL_VARIABLE, ""),
    )


def _digest_of_generators() -> str:
    """Return a digest of the states of PyTorch's, Python's and NumPy's generators on this rank."""
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8)
    digest.update(repr(random.getstate()).encode())
    if (numpy := sys.modules.get("numpy")) is not None:
        digest.update(repr(numpy.random.get_state()[1].tobytes()).encode())
    return digest.hexdigest()
