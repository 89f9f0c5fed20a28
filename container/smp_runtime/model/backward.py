"""``model.backward``: the backward pass of a microbatch, and the factor by which its loss is multiplied."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_records.rank_record import BACKWARD, current_record
from smp_runtime.data_parallel.reducer import AccumulationScale
from smp_runtime.errors import SMPUserError
from smp_runtime.job.invariants import invariants_of
from smp_runtime.nn.reached_calls import ReachedCalls

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.model.stages import Stages

#: How PyTorch's error about a graph that was freed begins.
_SECOND_BACKWARD = "Trying to backward through the graph a second time"


class Backward:
    """The backward passes of a model.

    Args:
        loss_scale: returns the loss scale of the optimizer that updates the model; 1 without fp16.
        averages_microbatches: whether gradients are averaged over the microbatches of a step, not summed.
    """

    def __init__(
        self, ranks: Ranks, stages: Stages, loss_scale: Callable[[], float], *, averages_microbatches: bool
    ) -> None:
        self._ranks = ranks
        self._stages = stages
        self._loss_scale = loss_scale
        self._averages_microbatches = averages_microbatches
        self._checks = invariants_of(ranks)
        self._runs = False
        self._accumulation: AccumulationScale | None = None
        self._calls: ReachedCalls | None = None

    def run(self, tensors: Any, grad_tensors: Any, retain_graph: bool | None, create_graph: bool, inputs: Any) -> None:
        """See :meth:`.DistributedModel.backward`."""
        step, pipeline = self._ranks.step, self._stages.pipeline
        if step.is_tracing:
            return
        if pipeline is not None and step.microbatch is None:
            raise SMPUserError(
                "model.backward was called outside a step, but with pipeline parallelism gradients flow over several ranks; call "
                "it in the function decorated with smp.step, right after the loss",
                code="SMP303",
            )
        outputs = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        self._checks.note_losses(outputs)
        scale = self._scale()
        gradients = _seeds(outputs, grad_tensors, scale)
        microbatch = -1 if step.microbatch is None else step.microbatch
        if pipeline is not None:
            _refuse(retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)
            current_record().enter(BACKWARD, microbatch)
            with pipeline.backward(), _advising(splits=True):
                torch.autograd.backward(outputs, gradients)
            return
        current_record().enter(BACKWARD, microbatch)
        # For the hooks of gradients, which must not scale once more what begins with this factor.
        self._runs, step.seed_scale = True, scale
        try:
            with _advising(splits=False), contextlib.nullcontext() if step.watch is None else step.watch.backward():
                if self._calls is None or inputs is not None or step.microbatch is None:
                    torch.autograd.backward(outputs, gradients, retain_graph, create_graph, inputs=inputs)
                else:
                    self._calls.backward(outputs, gradients, retain_graph=retain_graph, create_graph=create_graph)
        finally:
            self._runs, step.seed_scale = False, 1.0

    def scale_gradients(self, trained: Sequence[nn.Parameter], shares: Sequence[float]) -> None:
        """Multiply gradients by ``shares`` when they come.

        ``loss.backward()`` inside a step, or another model's, averages over microbatches like :meth:`run`.
        """
        # Tensors hold their hooks: a strong reference would make a cycle that the garbage collector cannot see.
        weak = weakref.ref(self)

        def scale_left() -> float:
            me = weak()
            return 1.0 if me is None else me.scale_left()

        self._accumulation = AccumulationScale(trained, shares, scale_left)

    def follow_calls(self, module: nn.Module) -> None:
        """Let losses of tensor parallel ranks depend on different results of modules, from now on.

        This only matters if each of these ranks has a batch of its own.
        """
        ranks = self._ranks
        if ranks.size(Group.TP) > 1 and ranks.size(Group.PP) == 1 and not ranks.cfg.prescaled_batch:
            self._calls = ReachedCalls(module, ranks)

    def begin_step(self) -> None:
        """Prepare for a step that begins."""
        if self._calls is not None:
            self._calls.begin()
        if self._accumulation is not None:
            self._accumulation.refresh()

    def _scale(self) -> float:
        """Return the factor for a loss: the fp16 loss scale, divided by the microbatches if they are averaged."""
        scale, inside = self._loss_scale(), self._ranks.step.microbatch is not None
        return scale / self._ranks.cfg.microbatches if inside and self._averages_microbatches else scale

    def scale_left(self) -> float:
        """Return the factor by which an arriving gradient must still be multiplied.

        It is 1 inside this model's own :meth:`run`.
        """
        pipeline = self._stages.pipeline
        if self._runs or (pipeline is not None and pipeline.is_in_model_backward):
            return 1.0
        return self._scale() / self._ranks.step.seed_scale


def _seeds(outputs: Sequence[torch.Tensor], given: Any, scale: float) -> list[torch.Tensor | None]:
    """Return the gradients of outputs with which backward begins; None stands for ones."""
    if isinstance(given, torch.Tensor):
        given = [given]
    gradients = [None] * len(outputs) if given is None else list(given)
    for index, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
        is_scalar = output.numel() == 1
        if gradient is None and not is_scalar:
            raise SMPUserError(
                f"backward got an output of shape {list(output.shape)} without a gradient; reduce it to a scalar "
                "loss, or pass its gradient in grad_tensors",
                code="SMP303",
            )
        # Not in place: the gradient is the script's.
        if scale != 1.0:
            seed = torch.ones_like(output) if gradient is None else gradient
            gradients[index] = seed * scale
    return gradients


def _refuse(**given: Any) -> None:
    """Refuse arguments that need a graph kept by pipeline stages.

    With pipeline parallelism every stage frees its part of the graph as backward leaves it.

    Raises:
        SMPUserError: an argument asks for more.
    """
    names = [f"{name}={value if isinstance(value, bool) else '…'}" for name, value in given.items() if _asks(value)]
    if names:
        raise SMPUserError(
            f"model.backward got {', '.join(names)}, but with pipeline parallelism a microbatch's graph lies on several ranks, "
            "each of which runs its part once and frees it; sum the losses and call model.backward(sum) once per microbatch, "
            "without these arguments",
            code="SMP303",
        )


def _asks(value: Any) -> bool:
    return value if isinstance(value, bool) else value is not None


@contextlib.contextmanager
def _advising(splits: bool) -> Iterator[None]:
    """Run the block, and add advice to PyTorch's error about a second backward pass.

    If the model is split over stages, no graph can be kept, so the advice is shorter.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith(_SECOND_BACKWARD):
            raise
        keep = "" if splits else ", or pass retain_graph=True to the first call"
        raise SMPUserError(
            "model.backward went through a graph a second time (or a saved tensor in it was read after backward), but backward "
            f"frees a graph as it runs; sum the losses and call model.backward(sum) once per microbatch{keep}",
            code="SMP303",
        ) from error
