"""A wrapped model in its steps: backward passes, how gradients are scaled, and when they are reduced."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime.activations.begin_step import begin_step
from smp_runtime.data_parallel.backward_agreement import BackwardAgreement
from smp_runtime.data_parallel.gradient_scaling import AccumulationScale
from smp_runtime.errors import SMPUserError
from smp_runtime.model.state_dict import SavedModel
from smp_runtime.tensors.torch_private import at_end_of_backward

#: How PyTorch's error about a graph that was freed begins.
_SECOND_BACKWARD = "Trying to backward through the graph a second time"


class SteppedModel(SavedModel):
    """A wrapped model whose gradients are reduced when a step, or a backward pass outside steps, has ended."""

    _averages_microbatches: bool
    _passes_per_reduction: int
    _in_backward: bool
    _closing_is_queued: bool
    _agreement: BackwardAgreement | None
    _accumulation: AccumulationScale | None
    _post_step_hooks: OrderedDict[int, Callable[..., Any]]

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        *,
        inputs: Any = None,
    ) -> None:
        """Backward from ``tensors``, as ``torch.autograd.backward``; inside a step, of one microbatch.

        Gradients are averaged over the microbatches unless ``average_grads_across_microbatches=False``.

        Args:
            tensors: the loss, or several outputs.
            grad_tensors: gradients of outputs that are not scalars.
            retain_graph: keep the graph for another backward pass; not with pipeline parallelism.
            create_graph: give gradients a graph of their own; not with pipeline parallelism.
            inputs: the only tensors that get gradients; not with pipeline parallelism.

        Raises:
            SMPUserError: an output that is not a scalar, without its gradient in ``grad_tensors``; an argument that pipeline
                parallelism cannot serve; or a second backward pass through a graph that the first has freed.
        """
        if self._ranks.step.is_tracing:
            return
        if self.pipeline is not None and self._ranks.step.microbatch is None:
            raise SMPUserError(
                "model.backward was called outside a step, but with pipeline parallelism gradients flow over several ranks; call "
                "it in the function decorated with smp.step, right after the loss"
            )
        outputs = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else grad_tensors
        gradients = [None] * len(outputs) if given is None else list(given)
        scale = self._gradient_scale()
        for index, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
            if gradient is None and output.numel() != 1:
                raise SMPUserError(
                    f"backward got an output of shape {list(output.shape)} without a gradient; reduce it to a scalar "
                    "loss, or pass its gradient in grad_tensors"
                )
            if scale != 1.0:
                seed = torch.ones_like(output) if gradient is None else gradient
                gradients[index] = seed * scale
        if self.pipeline is not None:
            _refuse(retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)
            with self.pipeline.backward(), _advising(splits=True):
                torch.autograd.backward(outputs, gradients)
            return
        self._in_backward, self._ranks.step.seed_scale = True, scale
        try:
            with _advising(splits=False):
                torch.autograd.backward(outputs, gradients, retain_graph, create_graph, inputs=inputs)
        finally:
            self._in_backward, self._ranks.step.seed_scale = False, 1.0

    def _gradient_scale(self) -> float:
        """What a loss is multiplied with: the loss scale of fp16, and one over the microbatches that are averaged."""
        optimizer = next((o for o in self._session.optimizers if o.updates(self)), self._session.optimizer)
        scale = optimizer.loss_scale if optimizer is not None else 1.0
        inside = self._ranks.step.microbatch is not None
        return scale / self._ranks.cfg.microbatches if inside and self._averages_microbatches else scale

    def _scale_left(self) -> float:
        """What a gradient that comes now must still be multiplied with: nothing in this model's own :meth:`backward`."""
        if self._in_backward or (self.pipeline is not None and self.pipeline.is_in_model_backward):
            return 1.0
        return self._gradient_scale() / self._ranks.step.seed_scale

    def _scale_foreign_gradients(self, trained: Sequence[nn.Parameter]) -> None:
        """``loss.backward()`` inside a step, or another model's, averages over microbatches like :meth:`backward`."""
        weak = weakref.ref(self)
        self._accumulation = AccumulationScale(trained, lambda: 1.0 if (me := weak()) is None else me._scale_left())

    # -- the step --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step-decorated function begins."""
        begin_step(self.module, self._staged_regions)
        trains = self.training and torch.is_grad_enabled()
        if trains:
            self._begin_training_pass()
        elif self._joined is None and self._ranks.step.count == 0:
            # Later evaluation steps must not wait for other replicas: some ranks may have fewer, or evaluate alone.
            self._share_loaded_state()
        if self._accumulation is not None:
            self._accumulation.refresh()
        if self._agreement is not None and self._joined is None and trains:
            self._agreement.open()
        self._open_window()

    def finish_step(self) -> bool:
        """All microbatches are done: reduce gradients, run the hooks; returns whether backward ran."""
        trained = True if self._reducer is None else self._reducer.touched or (self.shards or self._reducer).touched
        if self._reducer is not None:
            if self._anyone_trained(trained):
                self._finish_pass()
            self._open_window()
        for hook in list(self._post_step_hooks.values()):
            hook(self, self._session.optimizer)
        return trained and torch.is_grad_enabled()

    def _anyone_trained(self, trained: bool) -> bool:
        """Whether a data parallel rank has run backward in this step, so that all must reduce.

        Raises:
            SMPUserError: others have, but this rank has not, and they needed its parameters.
        """
        if self._agreement is None:
            return trained
        positions = self._agreement.close(trained)
        if positions and self.shards is not None and self._ranks.rank_in(Group.DP) not in positions:
            ranks = [self._ranks.members(Group.DP)[position] for position in positions]
            raise SMPUserError(
                f"rank {self._ranks.rank} ran no backward pass in this step, but the data parallel ranks {ranks} did, and with "
                "sharded data parallelism they need its part of the parameters then; run backward on every rank, of a loss "
                "multiplied by 0 where a rank has nothing to learn"
            )
        return bool(positions)

    def abandon_step(self) -> None:
        """A microbatch raised: its gradients are not reduced."""
        if self._agreement is not None:
            self._agreement.abandon()
        self._open_window()

    def _open_window(self) -> None:
        """Gradients that come from now on belong to the next pass, which reduces if it completes a group of passes."""
        if self._reducer is not None:
            self._reducer.begin_window(reduces=(self._passes + 1) % self._passes_per_reduction == 0)
        if self.shards is not None:
            self.shards.begin_window("train" if self.training and torch.is_grad_enabled() else "evaluate")

    def _finish_pass(self) -> None:
        """Backward has run: gradients are summed, and ready for the update if this completes a group of passes."""
        self._passes += 1
        if self._reducer is not None:
            self._reducer.finish_window()
        if self.shards is not None:
            self.shards.finish_window(reduces=self._passes % self._passes_per_reduction == 0)

    def _close_window(self) -> None:
        """A backward pass outside a step has ended."""
        self._closing_is_queued = False
        if self._reducer is not None:
            self._finish_pass()
            self._open_window()

    def _watch_backward(self, trained: Sequence[nn.Parameter]) -> None:
        """Tell the other ranks when backward begins in a step; without a step, it is a window of its own.

        Called before anything else watches the gradients, because the others must know before they are sent.
        """
        session, (position, size) = (
            self._session,
            (self._ranks.rank_in(Group.DP), self._ranks.size(Group.DP)),
        )
        agreement = BackwardAgreement(session.ranks.collectives, session.ranks.groups.group(Group.DP), position, size)
        self._agreement = agreement
        weak = weakref.ref(self)

        def gradient_comes(_: torch.Tensor) -> None:
            if session.ranks.step.microbatch is not None:
                agreement.tell()
            elif (model := weak()) is not None and not model._closing_is_queued:
                model._closing_is_queued = True
                at_end_of_backward(model._close_window)

        if self.shards is not None:  # gathers parameters before the first gradient comes
            self.shards.uses.backward_begins = agreement.tell
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(gradient_comes)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate gradients without reducing them; for loops without ``smp.step``."""
        before, self._passes_per_reduction = (self._passes_per_reduction, self._passes), 2**62
        self._open_window()
        try:
            yield
        finally:
            self._passes_per_reduction, self._passes = before
            self._open_window()


def _refuse(**given: Any) -> None:
    """With pipeline parallelism every stage frees its part of the graph as backward leaves it.

    Raises:
        SMPUserError: an argument asks for more.
    """
    names = [f"{name}={value if isinstance(value, bool) else '…'}" for name, value in given.items() if _asks(value)]
    if names:
        raise SMPUserError(
            f"model.backward got {', '.join(names)}, but with pipeline parallelism a microbatch's graph lies on several ranks, "
            "each of which runs its part once and frees it; sum the losses and call model.backward(sum) once per microbatch, "
            "without these arguments"
        )


def _asks(value: Any) -> bool:
    return value if isinstance(value, bool) else value is not None


@contextlib.contextmanager
def _advising(splits: bool) -> Iterator[None]:
    """PyTorch's error about a second backward pass, with advice that holds here.

    Args:
        splits: whether the model is split over stages, where a graph cannot be kept.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith(_SECOND_BACKWARD):
            raise
        keep = "" if splits else ", or pass retain_graph=True to the first call"
        raise SMPUserError(
            "model.backward went through a graph a second time (or a saved tensor in it was read after backward), but backward "
            f"frees a graph as it runs; sum the losses and call model.backward(sum) once per microbatch{keep}"
        ) from error
