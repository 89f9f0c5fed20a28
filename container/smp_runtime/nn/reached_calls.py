"""Losses of tensor parallel ranks with a batch each that depend on different results of split modules.

A split module joins the ranks' batches, so its backward pass has collectives that need every rank. Before a
backward pass runs, PyTorch knows which nodes of the graph it will reach. The ranks exchange this. If a rank's
loss leaves out a result that another rank's loss uses, it also begins backward there, with a gradient of zero.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from smp_config import Group
from smp_runtime.errors import SMPUserError
from smp_runtime.microbatch_state.compiled_blocks import is_compiled
from smp_runtime.tensors.nested import leaves_of
from smp_runtime.tensors.torch_private import backward_pass, will_run

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.job.ranks import Ranks


class _Result(NamedTuple):
    """A tensor that a module has returned, without its data, so that the memory can be freed.

    Attributes:
        module: its path.
        edge: where its gradient enters the graph.
    """

    module: str
    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zero(self) -> torch.Tensor:
        """Return a gradient of zero that takes no memory."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)


class _LeavesOut(Exception):
    """Ends a backward pass before anything of it has run."""


class ReachedCalls:
    """The results of split modules in the microbatch that runs, and which of them backward reaches on each rank.

    Args:
        module: the model; of compiled modules inside only their own results count.
    """

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        self._members = ranks.members(Group.TP)
        self._microbatch: int | None = None
        self._results: list[_Result] = []
        self._follow(module, "")

    def _follow(self, module: nn.Module, path: str) -> None:
        if not any(hasattr(part, "tensor_slices") for part in module.modules()):
            return
        # The module outlives this record, and is copied with its hooks.
        weak = weakref.ref(self)

        def called(_module: nn.Module, _args: Any, output: Any) -> None:
            if (me := weak()) is not None:
                me.note(path, output)

        module.register_forward_hook(called)
        for name, child in () if is_compiled(module) else module.named_children():
            self._follow(child, f"{path}.{name}" if path else name)

    def note(self, path: str, output: Any) -> None:
        """Record a module's ``output``, only inside a step: the results do not outlast it."""
        step = self._ranks.step
        if step.microbatch is None or step.is_tracing:
            return
        # A recomputed module runs inside backward, and was recorded in its forward pass.
        is_recomputed = backward_pass() != -1
        if is_recomputed or not torch.is_grad_enabled():
            return
        if step.microbatch != self._microbatch:
            self.begin(step.microbatch)
        for leaf in leaves_of([output]):
            has_graph = isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
            if has_graph:
                edge = get_gradient_edge(leaf)
                self._results.append(_Result(path, edge, leaf.shape, leaf.dtype, leaf.device))

    def begin(self, microbatch: int | None = None) -> None:
        """Forget the results at the start of a step or a microbatch."""
        self._results = []
        self._microbatch = microbatch

    def backward(
        self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], **options: Any
    ) -> None:
        """Run backward, on every rank through all results that any rank's loss uses.

        Raises:
            SMPUserError: the ranks have called different modules.
        """
        results, self._results = self._results, []
        roots, seeds = list[Any](outputs), list(gradients)
        while (left_out := self._attempt(results, roots, seeds, options)) is not None:
            # What hangs on a new root may again be something that others leave out.
            roots += [result.edge for result in left_out]
            seeds += [result.zero() for result in left_out]

    def _attempt(
        self, results: Sequence[_Result], roots: Sequence[Any], seeds: Sequence[torch.Tensor | None], options: Any
    ) -> list[_Result] | None:
        """Run backward if it reaches the same results on all ranks; else return those that this rank leaves out."""
        agreed = False
        left_out: list[_Result] | None = None

        def begins(*_: Any) -> None:
            nonlocal agreed, left_out
            if not agreed:
                left_out = self._left_out(results)
                if left_out is not None:
                    raise _LeavesOut
                agreed = True

        handles = []
        for root in roots:
            if isinstance(root, GradientEdge):
                handles.append(root.node.register_prehook(begins))
            elif root.requires_grad:
                handles.append(root.register_hook(begins))
        try:
            torch.autograd.backward(roots, seeds, **options)
        except _LeavesOut:
            return left_out
        finally:
            for handle in handles:
                handle.remove()
        return None

    def _left_out(self, results: Sequence[_Result]) -> list[_Result] | None:
        """Return the results that this rank's backward pass will not reach, but another's will.

        Return None if all ranks reach the same results.
        """
        reached = tuple(will_run(result.edge.node) for result in results)
        every = self._ranks.control.allgather(reached, self._members)
        counts = [len(theirs) for theirs in every]
        if len(set(counts)) > 1:
            raise SMPUserError(
                f"the ranks {self._members} of a tensor parallel group got {counts} results of split modules in this microbatch, "
                "but each of these puts the batches of all ranks together: let every rank call the same modules, or set "
                "prescaled_batch to true and give all ranks one batch",
                code="SMP307",
            )
        if len(set(every)) == 1:
            return None
        anywhere = [any(there) for there in zip(*every, strict=True)]
        return [
            result for result, is_wanted, is_here in zip(results, anywhere, reached, strict=True) if is_wanted > is_here
        ]
