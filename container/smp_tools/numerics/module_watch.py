"""Hooks on the modules of a wrapped model, for the results of their calls and the gradients of these results."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from smp_config import Group
from smp_records.numerics import INPUT, NUMBERS_OF_CALL, OUTPUT, OUTPUT_GRADIENT
from smp_runtime.context.exchange import ContextGroup
from smp_runtime.context.sequence import ShardedSequence
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.tensor_parallel.block_entry import entry_of
from smp_runtime.tensors.lazy_tensor import LazyTensor
from smp_runtime.tensors.nested import argument_tensors
from smp_runtime.tensors.torch_private import backward_pass
from smp_tools.numerics.journal import ValueOwner

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from smp_runtime.job.ranks import Ranks

#: Takes a tensor, and what to multiply it with.
Take = Callable[[ValueOwner, torch.Tensor, float], None]

#: Makes the gradient of a tensor of one rank's part of it.
_OfAll = Callable[[torch.Tensor], torch.Tensor]

#: Tensors of one result that are looked at.
_MOST_TENSORS = 4


class WatchedRank(Protocol):
    """The place of a rank, of a job of this library or of a plain script."""

    @property
    def topology(self) -> Any:
        """Return an object that is replaced if the degrees change."""

    @property
    def cfg(self) -> Any:
        """Return the parameters of the job."""

    @property
    def step(self) -> Any:
        """Return the running step: its microbatch, and whether it is traced."""

    def size(self, group: Group) -> int:
        """Return the number of ranks in a group."""

    def rank_in(self, group: Group) -> int:
        """Return the number of this rank in a group."""


class ModuleWatch:
    """Hooks on a model's modules that report every call while ``is_wanted`` returns True.

    Inside a block that tensor parallelism has split, results are parts with an unknown place in the whole. There it reports the
    block's own results, and not those of the modules in the block.

    Args:
        prefix: of the modules' names, for a job of several models.
        is_wanted: whether calls are to be reported now.
        take: receives the tensors.
        factor: gradients of results times this factor are those of the whole batch's mean loss.
        failed: receives an error of the watch itself, which must not reach the script's model.
    """

    def __init__(
        self,
        module: nn.Module,
        prefix: str,
        ranks: WatchedRank,
        is_wanted: Callable[[], bool],
        take: Take,
        factor: Callable[[], float],
        failed: Callable[[Exception], None],
    ) -> None:
        self._ranks, self._is_wanted, self._take, self._factor = ranks, is_wanted, take, factor
        self._failed = failed
        self._module, self._topology = weakref.ref(module), ranks.topology
        self._calls: dict[tuple[str, int | None, bool], int] = {}
        inside = _inside_split_blocks(module) if ranks.size(Group.TP) > 1 else frozenset()
        self._handles: list[RemovableHandle] = [
            part.register_forward_hook(_hook(self, f"{prefix}{path}"))
            for path, part in module.named_modules()
            if path not in inside
        ]
        self._handles.append(module.register_forward_pre_hook(_entering_hook(self, prefix), with_kwargs=True))

    def watches(self, module: nn.Module) -> bool:
        """Return whether ``module`` is the watched model in its current layout: at other degrees it has lost its hooks."""
        return self._module() is module and self._topology is self._ranks.topology

    def begin(self) -> None:
        """Begin a step: reset the count of calls."""
        self._calls.clear()

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def owner(self) -> int:
        """Return the index of the batch that this rank computes with."""
        return owner_of(self._ranks)

    def entered(self, name: str, given: Any) -> None:
        """Report the inputs of a call of the model."""
        if not self._listens() or backward_pass() != -1:
            return
        microbatch = self._ranks.step.microbatch
        for index, tensor in enumerate(argument_tensors(given)):
            # A single number is no part of a batch: each microbatch has it, and a count of tokens depends on how many there are.
            if isinstance(tensor, LazyTensor) or not tensor.dim():
                continue
            place = ValueOwner(INPUT, name, index, microbatch, self.owner)
            self._take(place, tensor, 1.0)

    def called(self, name: str, result: Any) -> None:
        """Report the results of a module, and register hooks for their gradients."""
        if not self._listens():
            return
        microbatch = self._ranks.step.microbatch
        # A checkpointed module runs again in backward. Its gradients come from that call; its results are known.
        again = backward_pass() != -1
        key = name, microbatch, again
        nth = self._calls[key] = self._calls.get(key, -1) + 1
        owner = self.owner
        for index, tensor in enumerate(argument_tensors(result)[:_MOST_TENSORS]):
            # A single number is no batch; of a loss, the one that the step returns counts, however the script has scaled this one.
            is_counted = tensor.is_floating_point() or tensor.is_complex()
            if isinstance(tensor, LazyTensor) or not is_counted or not tensor.dim():
                continue
            number = nth * NUMBERS_OF_CALL + index
            if not again:
                self._take(ValueOwner(OUTPUT, name, number, microbatch, owner), tensor, 1.0)
            if tensor.requires_grad and torch.is_grad_enabled():
                place = ValueOwner(OUTPUT_GRADIENT, name, number, microbatch, owner)
                tensor.register_hook(_gradient_hook(self, place, self._sum_of(tensor)))

    def came(self, place: ValueOwner, gradient: torch.Tensor, of_all: _OfAll | None) -> None:
        """Report the gradient of a result.

        Args:
            of_all: turns this rank's part of it into that of all ranks that share sequences out.
        """
        if not self._listens():
            return
        if of_all is None:
            self._take(place, gradient, self._factor())
        else:  # each of them has computed the loss of all
            self._take(place, of_all(gradient), self._factor() / self._ranks.size(Group.CONTEXT))

    def _sum_of(self, result: torch.Tensor) -> _OfAll | None:
        """Return what makes a result's gradient of its gradient on this rank; None if that is it."""
        if self._ranks.size(Group.CONTEXT) == 1:
            return None
        if isinstance(result, ShardedSequence):
            # Not the sequence itself: the garbage collector cannot follow tensor → hook references.
            held, layout, group = result.dim_held, result.sequence_layout, result.group
            return lambda gradient: ShardedSequence(gradient, held, layout, group)
        return ContextGroup.of(cast("Ranks", self._ranks)).add_up

    def hear(self, handle: Callable[..., None], *what: Any) -> None:
        """Call one of the methods above, and report what it raises."""
        try:
            handle(*what)
        except Exception as error:  # a hook that raised would end the training that it only watches
            self._failed(error)

    def _listens(self) -> bool:
        return self._is_wanted() and not self._ranks.step.is_tracing


def owner_of(ranks: WatchedRank) -> int:
    """Return the index of this rank's batch, counted among the ranks that read different ones."""
    return ranks.rank_in(_readers(ranks))


def owners_of(ranks: WatchedRank) -> int:
    """Return the number of different batches that the ranks read."""
    return ranks.size(_readers(ranks))


def _readers(ranks: WatchedRank) -> Group:
    return Group.BATCH_RDP if ranks.cfg.prescaled_batch else Group.BATCH_DP


def _inside_split_blocks(module: nn.Module) -> frozenset[str]:
    """Return the paths of all modules inside blocks that are split across a tensor parallel group."""
    inside: set[str] = set()
    starts: tuple[str, ...] = ()
    # In this order a block comes before the modules inside it, so that its start is known when
    # they are looked at.
    for path, part in module.named_modules():
        if path and path.startswith(starts):
            inside.add(path)
        if isinstance(part, DistributedModule) or entry_of(part) is not None:
            # Empty for a model that is such a block itself: all paths begin so.
            starts += (f"{path}." if path else "",)
    return frozenset(inside)


# Hooks are plain functions that hold their watch weakly: a model is copied with its hooks, and Python does not see the way
# from a tensor to them.


def _hook(watch: ModuleWatch, name: str) -> Callable[..., None]:
    weak = weakref.ref(watch)

    def called(module: nn.Module, args: Any, result: Any) -> None:
        if torch.compiler.is_compiling():  # inside a compiled block: only the block's own results count
            return
        if (found := weak()) is not None:
            found.hear(found.called, name, result)

    return called


def _entering_hook(watch: ModuleWatch, name: str) -> Callable[..., None]:
    weak = weakref.ref(watch)

    def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
        if (found := weak()) is not None:
            found.hear(found.entered, name, (args, kwargs))

    return entered


def _gradient_hook(watch: ModuleWatch, place: ValueOwner, of_all: _OfAll | None) -> Callable[[torch.Tensor], None]:
    weak = weakref.ref(watch)

    def came(gradient: torch.Tensor) -> None:
        if (found := weak()) is not None:
            found.hear(found.came, place, gradient, of_all)

    return came
