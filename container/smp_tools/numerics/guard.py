"""A guard that stops a job before an update that would corrupt its weights, and names the module with the first bad number."""

from __future__ import annotations

import json
import logging
import math
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from smp_config import Group
from smp_config.formats.strict_json import replace_non_finite
from smp_records.numerics import GRADIENT, GUARDS_VARIABLE, LOSS, OUTPUT, WEIGHT
from smp_runtime.checkpoint.live_state import live_weights
from smp_runtime.errors import NumericsError
from smp_runtime.step.step import first_scalar
from smp_runtime.tensors.lazy_tensor import LazyTensor
from smp_runtime.tensors.nested import argument_tensors
from smp_runtime.tensors.torch_private import backward_pass
from smp_tools.numerics.first_steps import gradients_of
from smp_tools.numerics.journal import part_name
from smp_tools.numerics.sketch import bits_of, plain_numbers

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from smp_records.numerics import Guards
    from smp_runtime.job.session import Session
    from smp_runtime.job.trained import TrainedOptimizer
    from smp_runtime.model.distributed_model import DistributedModel

logger = logging.getLogger("smp")

#: Of how many updates the median is, and how many there must be first.
_REMEMBERED, _WARM_UP = 64, 8
#: The order in which one bad number makes the next.
_CAUSES = (WEIGHT, OUTPUT, LOSS, GRADIENT)
#: Names that a message has.
_MOST_NAMES = 5


class Bad(NamedTuple):
    """A tensor with a number that is not finite."""

    cause: int  # in the order of causes
    order: float  # among those of the same kind: time of the call, or how far from the loss
    phase: str
    name: str
    microbatch: int | None
    rank: int

    def __str__(self) -> str:
        where = "" if self.microbatch is None else f", microbatch {self.microbatch}"
        return (
            f"{self.phase} of {self.name}{where} on rank {self.rank}"
            if self.name
            else f"{self.phase}{where} on rank {self.rank}"
        )


class _ResultSum(NamedTuple):
    """The sum over a module's result, which is finite as a rule only if all elements are; it stays on its device."""

    time: float
    name: str
    microbatch: int | None
    total: torch.Tensor


class _Norm(NamedTuple):
    """The norm of this rank's part of a parameter's gradient."""

    norm: float
    name: str
    rank: int


class UpdateGuard:
    """Looks at loss and gradients before each update, and at replicas now and then; all ranks decide the same.

    Args:
        folder: for the report of what has stopped the job.
    """

    outlives_regrouping = True

    def __init__(self, session: Session, guards: Guards, folder: Path) -> None:
        self._session, self._guards, self._folder = session, guards, folder
        self._sums: list[_ResultSum] = []
        self._losses: list[torch.Tensor] = []
        self._seen: dict[str, deque[float]] = {kind: deque(maxlen=_REMEMBERED) for kind in ("loss", "gradient norm")}
        self._handles: list[RemovableHandle] = []
        self._watched: list[weakref.ref[nn.Module]] = []
        self._topology = session.ranks.topology
        session.before_step.append(self.begin)
        session.after_step.append(self.end)
        session.before_update.append(self.before_update)
        if guards.replicas is not None:
            session.after_update.append(self.compare_replicas)
        self.watch_models()

    def watch_models(self) -> None:
        """Follow the modules of all wrapped models, also of those that were laid out anew."""
        if not self._guards.finite:
            return
        modules = [model.module for model in self._session.models]
        topology = self._session.ranks.topology
        watched = [reference() for reference in self._watched]
        if watched == modules and self._topology is topology:
            return
        self._topology = topology  # at other degrees a model has lost its hooks
        for handle in self._handles:
            handle.remove()
        self._handles = []
        # A model that the script drops must not live on for its checks.
        self._watched = [weakref.ref(module) for module in modules]
        for module in modules:
            for path, part in module.named_modules():
                is_leaf = next(part.children(), None) is None
                if is_leaf:
                    self._handles.append(part.register_forward_hook(_hook(self, path)))

    def begin(self) -> None:
        """Begin a step: watch the modules of all wrapped models."""
        self.watch_models()

    def end(self, result: Any) -> None:
        """End a step: record its losses."""
        if torch.is_grad_enabled():
            self._losses += [output.detach() for output in first_scalar(result)]

    def called(self, name: str, result: Any) -> None:
        """Record the result of a module without submodules."""
        step = self._session.ranks.step
        is_trained = torch.is_grad_enabled() and not step.is_tracing
        # In a backward pass, checkpointed regions call their modules again.
        if not is_trained or backward_pass() != -1:
            return
        for tensor in argument_tensors(result)[:1]:
            is_counted = tensor.is_floating_point() or tensor.is_complex()
            # The elements of a lazy tensor are elsewhere: a look at them would fetch them.
            if not is_counted or isinstance(tensor, LazyTensor):
                continue
            # The sum stays on the device: reading it here would wait for every module.
            total = plain_numbers(tensor).sum(dtype=torch.float32)
            self._sums.append(_ResultSum(time.time(), name, step.microbatch, total))

    # -- before the update -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_update(self, optimizer: TrainedOptimizer) -> None:
        """Look at loss and gradients; every rank calls it.

        Raises:
            NumericsError: on all ranks, where the update must not come.
        """
        losses, sums = self._losses, self._sums
        self._losses, self._sums = [], []
        if not self._guards.finite and self._guards.spike is None:
            return
        if getattr(optimizer, "overflow", False):  # float16: the update is skipped, and the loss scale falls
            return
        gradients = gradients_of(self._session.models, optimizer)
        loss, norm, is_finite = self._measured(losses, [gradient for _, gradient in gradients])
        if self._guards.finite and not is_finite:
            found = [
                *self._bad_weights(),
                *self._bad_sums(sums),
                *self._bad_losses(losses),
                *self._bad_gradients(gradients),
            ]
            self._stop_for_bad(found, loss, norm)
        if self._guards.spike is not None:
            for kind, value in (("loss", loss), ("gradient norm", norm)):
                self._check_spike(kind, value, gradients)

    def _measured(self, losses: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> tuple[float, float, bool]:
        """Return the mean loss, the norm of all ranks' gradients, and whether both are finite: the same on all ranks."""
        ranks = self._session.ranks
        numbers = torch.zeros(4, dtype=torch.float64, device=ranks.device)
        if losses:
            numbers[0] = torch.stack([loss.double().to(ranks.device).sum() for loss in losses]).sum()
            numbers[1] = len(losses)
        if gradients:
            numbers[2] = (
                torch.stack([torch.linalg.vector_norm(gradient).double().to(ranks.device) for gradient in gradients])
                .square()
                .sum()
            )
        numbers[3] = (~numbers[:3].isfinite().all()).double()
        numbers[:3].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        if ranks.size(Group.WORLD) > 1:
            ranks.collectives.all_reduce(numbers, ranks.groups.group(Group.WORLD)).wait()
        total, count, square, bad = numbers.tolist()
        return (total / count if count else 0.0), math.sqrt(square), not bad

    def _check_spike(self, kind: str, value: float, gradients: Sequence[tuple[str, torch.Tensor]]) -> None:
        seen = self._seen[kind]
        usual = median(seen) if len(seen) >= _WARM_UP else None
        limit = self._guards.spike
        if usual is not None and limit is not None and usual > 0 and value > limit * usual:
            step = self._session.progress.step
            greatest = self._greatest(gradients)
            at = f"; the greatest gradient is that of {greatest[0].name} on rank {greatest[0].rank}" if greatest else ""
            self._stop(
                f"{kind} {value:.6g} before update {step + 1} is {value / usual:.3g} times the median {usual:.6g} of the last "
                f"{len(seen)} updates, and {GUARDS_VARIABLE} allows {limit:g} times{at}; the weights are those of update {step}: "
                "look at this step's batch and the learning rate, or resume from the last checkpoint with a higher limit",
                {
                    "kind": kind,
                    "value": value,
                    "median": usual,
                    "update": step + 1,
                    "gradients": [dict(zip(_Norm._fields, one, strict=True)) for one in greatest],
                },
            )
        seen.append(value)

    def _greatest(self, gradients: Sequence[tuple[str, torch.Tensor]]) -> list[_Norm]:
        """Return the largest gradients of all ranks.

        Every rank must call it, after a decision that is the same on all ranks.
        """
        control = self._session.ranks.control
        norms: list[float] = []
        if gradients:  # one wait for the device
            stacked = torch.stack([torch.linalg.vector_norm(gradient).double() for _, gradient in gradients])
            norms = stacked.tolist()
        mine = []
        for (name, _), norm in zip(gradients, norms, strict=True):
            mine.append(_Norm(norm, name, control.rank))
        largest = sorted(mine, reverse=True)[:_MOST_NAMES]
        by_rank = control.allgather([tuple(one) for one in largest], list(range(control.size)))
        merged = [_Norm(*one) for theirs in by_rank for one in theirs]
        return sorted(merged, reverse=True)[:_MOST_NAMES]

    # -- bad values ------------------------------------------------------------------------------------------------

    def _models(self) -> list[DistributedModel]:
        return self._session.models  # type: ignore[return-value]  # the one class of them

    def _bad_weights(self) -> list[Bad]:
        bad = []
        for model in self._models():
            for holding in live_weights(model):
                if not _is_finite(holding.tensor):
                    bad.append(self._bad(WEIGHT, holding.name))
        return bad

    def _bad_sums(self, sums: Sequence[_ResultSum]) -> list[Bad]:
        return [self._bad(OUTPUT, one.name, one.microbatch, one.time) for one in sums if not bool(one.total.isfinite())]

    def _bad_losses(self, losses: Sequence[torch.Tensor]) -> list[Bad]:
        return [self._bad(LOSS, "", index) for index, loss in enumerate(losses) if not bool(loss.isfinite().all())]

    def _bad_gradients(self, gradients: Sequence[tuple[str, torch.Tensor]]) -> list[Bad]:
        """Return the gradients that are not finite.

        Backward goes from the loss to the input: the last module in the order of the model is the first in time.
        """
        return [
            self._bad(GRADIENT, name, order=-float(place))
            for place, (name, gradient) in enumerate(gradients)
            if not _is_finite(gradient)
        ]

    def _bad(self, phase: str, name: str, microbatch: int | None = None, order: float = 0.0) -> Bad:
        return Bad(_CAUSES.index(phase), order, phase, name, microbatch, self._session.ranks.rank)

    def _stop_for_bad(self, found: list[Bad], loss: float, norm: float) -> None:
        control = self._session.ranks.control
        said = control.allgather([tuple(bad) for bad in sorted(found)[:_MOST_NAMES]], list(range(control.size)))
        everyone = sorted(Bad(*bad) for theirs in said for bad in theirs)
        step = self._session.progress.step
        first = str(everyone[0]) if everyone else "nothing that is left of the step"
        self._stop(
            f"loss or gradients before update {step + 1} are not finite; the first number that is not is in the {first}. The "
            f"update was not made, the weights are those of update {step}: look at that module and this step's batch, lower the "
            f"learning rate, or resume from the last checkpoint; {GUARDS_VARIABLE} without finite goes on as before",
            {
                "kind": "not finite",
                "update": step + 1,
                "loss": loss,
                "gradient norm": norm,
                "found": [dict(zip(Bad._fields, bad, strict=True)) for bad in everyone],
            },
        )

    # -- replicas --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def compare_replicas(self, optimizer: TrainedOptimizer) -> None:
        """Compare replicas after an update: copies on several ranks must be bitwise equal. Every rank must call it.

        Raises:
            NumericsError: on all ranks, if they differ.
        """
        step, every = self._session.progress.step, self._guards.replicas
        if every is None or step % every:
            return
        parts = []
        for model in self._models():
            for holding in live_weights(model):
                name = f"{holding.name}|{part_name(holding.region)}"
                parts.append((name, bits_of(holding.tensor.detach())))
        values = torch.cat([bits for _, bits in parts]).tolist() if parts else []
        mine = {name: value for (name, _), value in zip(parts, values, strict=True)}
        control = self._session.ranks.control
        everyone = control.allgather(mine, list(range(control.size)))
        differing: dict[str, list[int]] = {}
        for name in dict.fromkeys(name for theirs in everyone for name in theirs):
            having = {rank: theirs[name] for rank, theirs in enumerate(everyone) if name in theirs}
            usual = Counter(having.values()).most_common(1)[0][0]
            if odd := [rank for rank, value in having.items() if value != usual]:
                differing[name.replace("|", " ").strip()] = odd
        if differing:
            names = "; ".join(f"{name} on rank(s) {odd}" for name, odd in list(differing.items())[:_MOST_NAMES])
            self._stop(
                f"replicas differ after update {step} in {len(differing)} of {len(mine)} tensors, though they are copies of each "
                f"other: {names}. Something has changed them on some ranks only: look for code that writes weights, skips an "
                "update or runs on one rank alone, and resume from a checkpoint that was saved before",
                {"kind": "replicas", "update": step, "tensors": differing},
            )

    # -- the end ---------------------------------------------------------------------------------------------------

    def _stop(self, text: str, report: dict[str, Any]) -> None:
        if self._session.ranks.rank == 0:
            place = self._folder / "numerics-guard.json"
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                place.write_text(
                    json.dumps({**replace_non_finite(report), "message": text}, indent=1) + "\n", encoding="utf-8"
                )
                logger.error("report: %s", place)
            except OSError as error:
                logger.warning("the report cannot be written to %s (%s)", place, error.strerror or error)
        raise NumericsError(text)


def _is_finite(tensor: torch.Tensor) -> bool:
    numbers = plain_numbers(tensor)
    wide = numbers.float() if numbers.element_size() == 1 else numbers  # PyTorch does not ask float8
    return bool(wide.isfinite().all())


def _hook(guard: UpdateGuard, name: str) -> Callable[..., None]:
    """Return a plain function with a weak reference to the guard, because a model is copied with its hooks."""
    weak = weakref.ref(guard)

    def called(module: nn.Module, args: Any, result: Any) -> None:
        if (found := weak()) is not None:
            found.called(name, result)

    return called
