"""The batch that a pipeline trains on: the one of its first rank, whichever stage runs the step function.

Scripts give the rank with ``smp.pp_rank() == 0`` the data, and the others the same or placeholders. Batches
are compared in some calls, by a few numbers. Once they have differed, every step's arguments travel from
the first rank to the one that reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_runtime.comm.control import RUNTIME_CHANNEL
from smp_runtime.errors import RankLeftError, SMPUserError
from smp_runtime.tensors.nested import leaves_of
from smp_runtime.tensors.torch_private import TreeSpec, tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks

#: Elements of a tensor that are added up, to see whether ranks have read the same batch.
_PROBED_ELEMENTS = 4096

#: Batches are compared in the first call, and then in every fourth, sixteenth … only, since ranks and devices wait for it.
_LESS_OFTEN = 4

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class _Sent:
    """A leaf in the form in which it is sent."""

    value: Any
    on_device: bool = False  # whether it is a tensor of the sender's device


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A stand-in for a leaf that is not sent, such as a model: every rank has its own."""

    kind: str  # its class


class FirstStageInputs:
    """The arguments of a pipeline's first rank, for each step of a job.

    Attributes:
        travel: whether arguments are sent, because ranks of this pipeline have had different ones.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._members = ranks.members(Group.PP)
        self._calls = 0
        self._next_look = 1
        self.travel = False

    def of_step(self, arguments: Arguments, name: str, reader: int | None) -> Arguments:
        """Return the arguments of a step; every rank of a pipeline calls it, with its own.

        Args:
            name: of the step, for messages.
            reader: global rank that runs the step function; None if every rank may, as before the model is partitioned.

        Returns:
            On a rank that runs the function the first rank's arguments, otherwise this rank's own.

        Raises:
            SMPUserError: the first rank's arguments hold something that cannot travel, and this rank has no
                replacement.
        """
        try:
            return self._of_step(arguments, name, reader)
        except RankLeftError:
            if reader is None:
                raise
            return arguments  # the pipeline's own connections report it in more detail

    def _of_step(self, arguments: Arguments, name: str, reader: int | None) -> Arguments:
        leaves, spec = tree_flatten(arguments)
        self._look(leaves, spec)
        first = self._members[0]
        if not self.travel or reader == first:
            return arguments
        is_first = self._ranks.rank == first
        message = _message(leaves, spec) if is_first else None
        if reader is None:
            message = self._ranks.control.broadcast(message, self._members)
        elif is_first:
            self._ranks.control.send(message, reader, RUNTIME_CHANNEL)
        elif self._ranks.rank == reader:
            message = self._ranks.control.receive(first, RUNTIME_CHANNEL)
        if is_first or message is None:
            return arguments
        return _merged(self._ranks, message, first, (leaves, spec), f"the step {name}")

    def _look(self, leaves: list[Any], spec: TreeSpec) -> None:
        """Compare the arguments of all ranks, less and less often; once they differ, those of the first rank travel."""
        self._calls += 1
        if self.travel or self._calls < self._next_look:
            return
        self._next_look *= _LESS_OFTEN
        seen = (repr(spec), [_described(leaf) for leaf in leaves])
        first, *others = self._ranks.control.allgather(seen, self._members)
        are_equal = all(other == first for other in others)
        self.travel = not are_equal


def arguments_of_all(ranks: Ranks, members: Sequence[int], arguments: Arguments, name: str) -> list[Arguments]:
    """Return the arguments of each of ``members`` for the same call; every one of them calls this, with its own.

    Raises:
        SMPUserError: those of another rank hold something that cannot travel, and this rank has no replacement.
    """
    leaves, spec = tree_flatten(arguments)
    every = ranks.control.allgather(_message(leaves, spec), members)
    return [
        arguments if rank == ranks.rank else _merged(ranks, message, rank, (leaves, spec), name)
        for rank, message in zip(members, every, strict=True)
    ]


def _message(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """Return arguments in the form in which they are sent."""
    return tree_unflatten([_sent(leaf) for leaf in leaves], spec)


def _merged(ranks: Ranks, message: Any, source: int, own: tuple[Sequence[Any], TreeSpec], name: str) -> Arguments:
    """Return the arguments of rank ``source``, with this rank's own objects for those that were not sent."""
    leaves, theirs = tree_flatten(message)
    mine, spec = own
    kinds = [leaf.kind for leaf in leaves if isinstance(leaf, _Kept)]
    if kinds and theirs != spec:
        raise SMPUserError(
            f"rank {ranks.rank} called {name} with other arguments than rank {source}, whose arguments are used here; they hold "
            f"a {kinds[0]}, which is not sent between ranks, and it is not clear what stands for it here: pass arguments of the "
            "same structure on every rank of a model parallel group",
            code="SMP302",
        )
    received = [mine[n] if isinstance(leaf, _Kept) else _received(leaf, ranks) for n, leaf in enumerate(leaves)]
    args, kwargs = tree_unflatten(received, theirs)
    return tuple(args), dict(kwargs)


def _received(leaf: _Sent, ranks: Ranks) -> Any:
    if not leaf.on_device:
        return leaf.value
    moved = leaf.value.detach().to(ranks.device)
    return moved.requires_grad_() if leaf.value.requires_grad else moved


def probe(tensor: torch.Tensor) -> float | None:
    """Return a number that normally differs for different tensors; None for kinds of tensors that are not examined."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta or tensor.is_complex():
        return None
    some = tensor.detach().reshape(-1)[:_PROBED_ELEMENTS].to(torch.float64)
    return float((some * torch.arange(1, len(some) + 1, device=some.device)).sum())


def _described(leaf: Any) -> str:
    """Return text that is equal if ranks have read the same leaf."""
    if isinstance(leaf, torch.Tensor):
        return f"{list(leaf.shape)} {leaf.dtype} {probe(leaf)!r}"
    if isinstance(leaf, Mapping):
        inside = [_described(inner) for inner in leaves_of(leaf)]
        return f"{list(leaf)} {inside}"
    if _is_plain(leaf):
        return repr(leaf)
    return type(leaf).__name__


def _sent(leaf: Any) -> _Sent | _Kept:
    if isinstance(leaf, torch.Tensor):
        plain = leaf.detach().cpu().clone()  # a view would bring all of its memory along
        plain.requires_grad_(leaf.requires_grad)
        return _Sent(plain, leaf.device.type != "cpu")
    if _is_plain(leaf) or isinstance(leaf, Mapping):
        return _Sent(leaf)
    return _Kept(type(leaf).__name__)


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes)
