"""Hooks around the calls of a block that is split in place: the batch of the whole group, and random numbers.

Inside such a block activations are replicated: every rank has all rows of the group's batch. With a batch per
rank, the tensors that carry it are gathered when the block is called, and its results are returned to their
owners. If one block returns a tensor and the next one takes it, it is not sent twice: the whole is remembered
with the part.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from smp_config import Group
from smp_config.errors import kind_of
from smp_runtime.errors import SMPUserError
from smp_runtime.tensor_parallel import collectives
from smp_runtime.tensor_parallel.deferred import of_all_rows, of_own_rows
from smp_runtime.tensor_parallel.random_tracker import RandomTracker
from smp_runtime.tensors.nested import leaves_of, map_leaves

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.tensor_parallel.group import TensorGroup

#: Attribute of a block with an entry.
_MARK = "_smp_block_entry"


class SharedInput:
    """The input of several split linear maps: its gradients are summed over the ranks once for all of them."""

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        """Return a replicated tensor for uses that differ between ranks, the same for each use of one input."""
        is_trained = torch.is_grad_enabled() and x.requires_grad
        if group.size == 1 or not is_trained:
            return x
        last = self._last
        # A second call with the same tensor would sum its gradients by a second collective.
        if last is None or last[0] is not x:
            last = (x, collectives.use_replicated(x, group))
            self._last = last
        return last[1]

    def clear(self) -> None:
        """Forget the last input, so that it is not kept alive."""
        self._last = None

    def clear_behind(self, block: nn.Module, args: Any, result: Any) -> None:
        """Forget the last input after the block's forward pass; PyTorch's hook."""
        self.clear()

    def __deepcopy__(self, memo: Any) -> SharedInput:
        made = memo[id(self)] = SharedInput()
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {"_last": None}


class _Wholes:
    """Tensors of the whole group's batch, by this rank's part of them; kept once per job."""

    def __init__(self) -> None:
        self._found: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def note(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        if not mine.is_inference():
            self._found[mine] = (whole, mine._version)

    def find(self, mine: torch.Tensor) -> torch.Tensor | None:
        """Return the whole, unless its part was changed since, or autograd knows only one of them."""
        whole, version = self._found.get(mine, (None, 0))
        fits = whole is not None and whole.requires_grad == mine.requires_grad and mine._version == version
        return whole if fits else None


class _TracedWholes(_Wholes):
    """Batches of calls that only trace the model, each with this rank's rows alone."""


@dataclass
class _BlockCall:
    """A call of a block.

    Attributes:
        block: which one.
        ending: what ends with it.
        batch: rows of this rank's batch; None if it has the group's.
    """

    block: nn.Module
    ending: contextlib.ExitStack
    batch: int | None = None


class _BlockCalls(threading.local):
    """The calls that a thread is in, outermost first."""

    open: tuple[_BlockCall, ...] = ()


_calls = _BlockCalls()


class BlockEntry:
    """Hooks around the calls of a block.

    Args:
        group: the ranks that share the block.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    @property
    def prescaled(self) -> bool:
        """Return whether the ranks have one batch outside the block too."""
        return self._group.prescaled

    def watch(self, block: nn.Module) -> None:
        """Begin with the next call of ``block``."""
        block.__dict__[_MARK] = self
        # First of all: what slices arguments finds those of the group's batch.
        block.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True)
        block.register_forward_hook(self.leave, always_call=True)

    def enter(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the tensors that carry the batch; PyTorch's hook."""
        group = self._group
        call = _BlockCall(block, contextlib.ExitStack())
        _calls.open = (*_calls.open, call)
        if block.training and not group.is_tracing:
            call.ending.enter_context(RandomTracker.of(group).replicated(group.device))
        if group.prescaled:
            return None
        call.batch = batch = _batch_of((args, kwargs))
        if batch is None:
            raise SMPUserError(
                f"{kind_of(block)} that is split over {group.size} ranks with a batch per rank was called without a tensor "
                "of a batch: give it one of [batch, …], or set prescaled_batch to true",
                code="SMP307",
            )
        return self._gathered(block, batch, args, kwargs)

    def leave(self, block: nn.Module, args: Any, result: Any) -> Any:
        """Return the results to their owners; PyTorch's hook, also behind a call that failed."""
        if not _calls.open or _calls.open[-1].block is not block:  # it failed before it came here
            return None
        call, _calls.open = _calls.open[-1], _calls.open[:-1]
        call.ending.close()
        batch = call.batch
        if batch is None or result is None:
            return None
        return map_leaves(lambda leaf: self._mine(block, leaf, batch), result)

    def _gathered(self, block: nn.Module, batch: int, args: Any, kwargs: Any) -> Any:
        wholes = self._wholes()
        leaves = leaves_of((args, kwargs))
        for leaf in leaves:
            if not _carries(leaf, batch):
                _refuse_gradient(block, leaf, batch, "was called with")
        if any(_carries(leaf, batch) and wholes.find(leaf) is None for leaf in leaves):
            self._agree(block, leaves, batch)

        def whole(leaf: Any) -> Any:
            if not _carries(leaf, batch):
                return leaf
            found = wholes.find(leaf)
            if found is None:
                found = of_all_rows(leaf)
            if found is None:
                found = self._gather(leaf)
                wholes.note(leaf, found)
            return found

        return map_leaves(whole, args), map_leaves(whole, kwargs)

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        if mine.requires_grad:
            return collectives.gather_slices(mine, self._group, 0, partial=False)
        # Not every backend sends truth values.
        sent = mine.to(torch.uint8) if mine.dtype == torch.bool else mine
        return self._group.gather(sent, 0).to(mine.dtype)

    def _mine(self, block: nn.Module, leaf: Any, batch: int) -> Any:
        rows = batch * self._group.size
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or not leaf.shape[0] or leaf.shape[0] % rows:
            _refuse_gradient(block, leaf, rows, "returned")
            return leaf
        if (own := of_own_rows(leaf)) is not None:
            return own
        mine = collectives.take_slice(leaf, self._group, 0)
        self._wholes().note(mine, leaf)
        return mine

    def _wholes(self) -> _Wholes:
        """Return the remembered wholes.

        A tracing call runs on one rank alone and has only its rows, so it keeps its own.
        """
        kept = _TracedWholes if self._group.is_tracing else _Wholes
        return self._group.ranks.keep(kept, kept)

    def _agree(self, block: nn.Module, leaves: list[Any], batch: int) -> None:
        """Check that all ranks call the block with tensors of the same shapes."""
        group = self._group
        if group.is_tracing:
            return
        mine = [tuple(leaf.shape) if _carries(leaf, batch) else None for leaf in leaves]
        members = group.ranks.members(Group.TP)
        every = group.ranks.control.allgather(mine, members)
        for rank, theirs in zip(members[1:], every[1:], strict=True):
            if theirs != every[0]:
                raise SMPUserError(
                    f"the ranks {members} of a tensor parallel group call {kind_of(block)}, which is split over them, "
                    f"with different tensors: {_shapes(every[0])} on rank {members[0]}, {_shapes(theirs)} on rank {rank}. With a "
                    "batch per rank it sees all of their batches at once: pad all to one length, use batches of one size, and give "
                    "masks on all ranks or on none",
                    code="SMP307",
                )

    def __deepcopy__(self, memo: Any) -> BlockEntry:
        return self


def is_in_block() -> bool:
    """Return whether the calling thread runs a block that is split in place.

    In such a block all ranks have the rows of all batches.
    """
    return bool(_calls.open)


def entry_of(module: nn.Module) -> BlockEntry | None:
    """Return the hooks around a module that is split in place; None for others."""
    return module.__dict__.get(_MARK)


def _batch_of(arguments: Any) -> int | None:
    leaves = [leaf for leaf in leaves_of(arguments) if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2]
    floating = [leaf for leaf in leaves if leaf.is_floating_point()]
    first = next(iter(floating or leaves), None)
    return None if first is None else int(first.shape[0])


def _carries(leaf: Any, batch: int) -> bool:
    """Return whether the first dim of a value is the batch.

    A batch of one row is found only in tensors with more than one dim.
    """
    if not isinstance(leaf, torch.Tensor):
        return False
    least_dims = 2 if batch == 1 else 1
    return leaf.dim() >= least_dims and leaf.shape[0] == batch


def _refuse_gradient(block: nn.Module, leaf: Any, rows: int, what: str) -> None:
    """Raise an error if a tensor without the batch requires a gradient.

    All ranks share such a tensor: outside, its gradient is that of one batch, but inside that of all batches.
    """
    if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
        raise SMPUserError(
            f"{kind_of(block)} that is split in place {what} a tensor of shape {list(leaf.shape)} that gradients flow "
            f"through, whose first dim is not the batch of {rows} rows, so with a batch per rank it belongs to none of them: set "
            "prescaled_batch to true, or take the block out by smp.set_tensor_parallelism(module, plan={})",
            code="SMP307",
        )


def _shapes(found: list[tuple[int, ...] | None]) -> str:
    present = [str(list(shape)) for shape in found if shape is not None]
    return ", ".join(present) or "none"
