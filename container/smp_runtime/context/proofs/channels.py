"""Scans, as of Mamba and linear attention: each rank computes some channels or heads at all positions.

A scan is a recurrence along positions, so that a rank cannot begin before the one with the positions before has ended. But its
channels are independent of each other. So ranks exchange positions for channels before a scan, and channels for positions after
it. A function is proven to treat each channel on its own before that, once for each form of its calls. Without a proof it runs
on whole sequences.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smp_runtime.context.exchange import ContextGroup, exchange
from smp_runtime.context.layout import SequenceLayout, contiguous
from smp_runtime.context.sequence import ShardedSequence, cut_results, gather_all, sequences_in
from smp_runtime.tensors.torch_private import tree_flatten, tree_map

#: Names of functions that are tried, in the modules of models.
_SCANS = re.compile(r"_scan$|_scan_fn$|_scan_combined$|delta_rule$|_delta_attention$|_kda$|^rwkv_linear_attention")

#: Positions of a rank that a proof computes on.
_SAMPLE = 24

#: Relative difference of results that count as equal in a proof, by the size of a number in bytes. Some functions compute in
#: float32 whatever they get.
_TOLERANCE = {8: 1e-5, 4: 1e-4, 2: 3e-2}


@dataclass(frozen=True)
class _Role:
    """How an argument is split: by channel along ``dim``, or not at all if that is None."""

    dim: int | None


class ByChannel:
    """A function of sequences with independent channels: each rank runs some of them at all positions.

    Args:
        call: the function.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._proven: dict[tuple[Any, ...], bool] = {}
        functools.update_wrapper(self, call)

    def __reduce__(self) -> Any:
        # By name, as functions are: modules that keep it are copied and saved.
        return _find, (self._call.__module__, self._call.__qualname__)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it on some channels if that is right, else on whole sequences."""
        found = sequences_in((args, kwargs))
        if not found:
            return self._call(*args, **kwargs)
        first, leaves = found[0], tree_flatten((args, kwargs))[0]
        roles = _roles_of(leaves, found, first.group.size)
        if roles is not None and self._is_proven(first, leaves, roles, args, kwargs):
            return self._call_by_channel(first, roles, args, kwargs)
        name = getattr(self._call, "__name__", "scan")
        return cut_results(self._call(*gather_all(args, name), **gather_all(kwargs, name)), first)

    def _call_by_channel(self, first: ShardedSequence, roles: list[_Role], args: Any, kwargs: Any) -> Any:
        group, layout, left = first.group, first.sequence_layout, iter(roles)

        def give(leaf: Any) -> Any:
            role = next(left)
            if isinstance(leaf, ShardedSequence):
                if role.dim is not None:
                    return swap(leaf, role.dim)
                return group.gather(leaf.local, leaf.dim_held, layout)  # what all channels share
            return leaf if role.dim is None else leaf.chunk(group.size, role.dim)[group.rank]

        given, named = tree_map(give, (args, kwargs))

        def take(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2:
                return leaf
            if leaf.dim() > first.dim_held and leaf.shape[first.dim_held] == layout.size:
                channels = _channel_dim(first.dim_held)
                swapped = _Swap(first.dim_held, channels, layout, group)
                local = exchange(leaf, group, swapped.to_positions, swapped.to_channels)
                return ShardedSequence(local, first.dim_held, layout, group)
            return group.gather(leaf, 1, contiguous(leaf.shape[1] * group.size, group.size))  # a state

        return tree_map(take, self._call(*given, **named))

    def _is_proven(self, first: ShardedSequence, leaves: list[Any], roles: list[_Role], args: Any, kwargs: Any) -> bool:
        form = tuple(_describe(leaf) for leaf in leaves)
        if form not in self._proven:
            trial = _Trial(self._call, roles, first.group.size, args, kwargs)
            verdict = trial.is_equal(first, leaves)
            votes = torch.tensor([float(not verdict)], device=first.device)
            self._proven[form] = not first.group.add_up(votes).item()
        return self._proven[form]


class _Trial:
    """Sample inputs of a call, whole and split by channel.

    Args:
        call: the function.
        roles: of its arguments.
        parts: ranks.
        args, kwargs: with the structure of the arguments.
    """

    def __init__(self, call: Callable[..., Any], roles: list[_Role], parts: int, args: Any, kwargs: Any) -> None:
        self._call, self._roles, self._parts, self._given = call, roles, parts, (args, kwargs)

    def is_equal(self, first: ShardedSequence, leaves: list[Any]) -> bool:
        """Return whether parts of the channels have the results and gradients that they have among all.

        In float64, or in the types of the arguments if the function does not take float64.
        """
        count = min(_SAMPLE, *first.sequence_layout.counts())
        if count < 1:
            return False
        for exactly in (True, False):
            sample = [_sampled(leaf, count, exactly=exactly) for leaf in leaves]
            try:
                return self._prove(sample, first.dim_held, count, 8 if exactly else first.element_size())
            except (
                RuntimeError,
                ValueError,
                IndexError,
                TypeError,
            ):  # it cannot run on some channels, or not in this type
                continue
        return False

    def _prove(self, sample: list[Any], held: int, count: int, width: int) -> bool:
        every, wanted = self._run(sample, None)
        parts = [self._run(sample, part) for part in range(self._parts)]
        pairs = []
        for place, one in enumerate(every):
            has_positions = one.dim() > max(2, held) and one.shape[held] == count
            dim = _channel_dim(held) if has_positions else 1
            pairs.append((torch.cat([made[place] for made, _ in parts], dim), one))
        for place, (role, gradient) in enumerate(wanted):
            theirs = [found[place][1] for _, found in parts]
            joined = torch.stack(theirs).sum(0) if role.dim is None else torch.cat(theirs, role.dim)
            pairs.append((joined, gradient))
        return _are_close(pairs, _TOLERANCE[width])

    def _run(self, sample: list[Any], part: int | None) -> tuple[list[torch.Tensor], list[tuple[_Role, torch.Tensor]]]:
        """Return results for a part of the channels, or all, and the gradients of the arguments."""
        pairs = [(_share(leaf, role, part, self._parts), role) for leaf, role in zip(sample, self._roles, strict=True)]
        left = iter(pairs)
        with torch.enable_grad():
            args, kwargs = tree_map(lambda _: next(left)[0], self._given)
            results = tree_flatten(self._call(*args, **kwargs))[0]
            made = [one for one in results if isinstance(one, torch.Tensor)]
            trained = [(leaf, role) for leaf, role in pairs if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            total = sum((torch.sin(one).sum() for one in made if one.requires_grad), torch.zeros(()))
        if not trained or not total.requires_grad:
            return [one.detach() for one in made], []
        gradients = torch.autograd.grad(total, [leaf for leaf, _ in trained], allow_unused=True, materialize_grads=True)
        found = [(role, gradient) for (_, role), gradient in zip(trained, gradients, strict=True)]
        return [one.detach() for one in made], found


def _find(module: str, name: str) -> Any:
    """Return what a file of a model has by a name."""
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def _are_close(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], tolerance: float) -> bool:
    for one, other in pairs:
        if one.shape != other.shape:
            return False
        if not one.numel():
            continue
        scale = max(float(other.abs().max()), 1e-30)
        error = float((one - other).abs().max())
        if error > tolerance * scale:
            return False
    return True


def _sampled(leaf: Any, count: int, *, exactly: bool) -> Any:
    """Return some positions of a slice and whole tensors, in float64 for ``exactly``; all else as it is."""
    if isinstance(leaf, ShardedSequence):
        leaf = leaf.local.narrow(leaf.dim_held, 0, count)
    if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
        return leaf.detach().double() if exactly else leaf.detach()
    return leaf


def _share(leaf: Any, role: _Role, part: int | None, size: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    share = leaf
    if part is not None and role.dim is not None:
        share = leaf.chunk(size, role.dim)[part]
    share = share.clone()
    if share.is_floating_point():
        share.requires_grad_()
    return share


def _channel_dim(held: int) -> int:
    """Return the dim with the channels or heads: ``[batch, positions, heads, …]`` or ``[batch, channels, positions]``."""
    return 2 if held == 1 else 1


def _channels_of(sequence: ShardedSequence) -> int:
    return sequence.shape[_channel_dim(sequence.dim_held)]


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, ShardedSequence):
        return tuple(leaf.local.shape[:1]), leaf.dim(), leaf.dim_held, _channels_of(leaf), leaf.dtype
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape)
    return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf)


def _roles_of(leaves: list[Any], found: list[ShardedSequence], size: int) -> list[_Role] | None:
    """Return what becomes of each argument; None if their shapes do not let channels be divided."""
    first = found[0]
    alike = all(one.sequence_layout == first.sequence_layout and one.dim_held == first.dim_held for one in found)
    plain = first.sequence_layout.outer == first.sequence_layout.inner == 1
    if not alike or not plain or first.dim_held not in (1, 2) or any(one.dim() < 3 for one in found):
        return None
    most = max(_channels_of(one) for one in found)
    if most % size:
        return None
    roles = []
    for leaf in leaves:
        role = _role_of(leaf, most, size, first.dim_held)
        if role is None:
            return None
        roles.append(role)
    return roles


def _role_of(leaf: Any, most: int, size: int, held: int) -> _Role | None:
    """Return what becomes of an argument; None if it can be neither divided nor used whole."""
    if not isinstance(leaf, torch.Tensor):
        return _Role(None)
    if not isinstance(leaf, ShardedSequence):
        is_state = leaf.dim() > 2 and leaf.shape[1] == most
        if is_state:
            return _Role(1)
        return _Role(0) if leaf.dim() and leaf.shape[0] == most else _Role(None)
    channels = _channels_of(leaf)
    if channels == most:
        return _Role(_channel_dim(held))
    if held == 2 or channels == 1:  # numbers of states, or one group for all heads
        return _Role(None)
    return _Role(_channel_dim(held)) if channels % size == 0 and most % channels == 0 else None


def swap(sequence: ShardedSequence, channels: int) -> torch.Tensor:
    """Return some channels of all positions in exchange for all channels of some positions."""
    swapped = _Swap(sequence.dim_held, channels, sequence.sequence_layout, sequence.group)
    return exchange(sequence.local, sequence.group, swapped.to_channels, swapped.to_positions)


@dataclass(frozen=True)
class _Swap:
    """A permutation of the ranks' elements; its inverse is its adjoint."""

    dim: int
    channels: int
    layout: SequenceLayout
    group: ContextGroup

    def to_channels(self, local: torch.Tensor) -> torch.Tensor:
        """Return this rank's channels at all positions."""
        size, counts = self.group.size, self.layout.counts()
        first = local.movedim((self.dim, self.channels), (0, 1))
        sent = first.unflatten(1, (size, -1)).movedim(1, 0)
        share = list(sent.shape[2:])
        parts = _send(sent.reshape(-1), [sent[0].numel()] * size, [n * sent[0, 0].numel() for n in counts], self.group)
        whole = local.new_empty(self.layout.length, *share)
        for positions, part in zip(self.layout.positions, parts, strict=True):
            whole[positions.to(local.device)] = part.view(-1, *share)
        return whole.movedim((0, 1), (self.dim, self.channels)).contiguous()  # models take views of it

    def to_positions(self, whole: torch.Tensor) -> torch.Tensor:
        """Return all channels at this rank's positions."""
        size, counts = self.group.size, self.layout.counts()
        first = whole.movedim((self.dim, self.channels), (0, 1))
        share, width = list(first.shape[1:]), first[0].numel()
        rows = [first[positions.to(whole.device)].reshape(-1) for positions in self.layout.positions]
        here = counts[self.group.rank]
        parts = _send(torch.cat(rows), [n * width for n in counts], [here * width] * size, self.group)
        local = torch.stack([part.view(here, *share) for part in parts], 1).flatten(1, 2)
        return local.movedim((0, 1), (self.dim, self.channels)).contiguous()


def _send(sent: torch.Tensor, leaving: list[int], arriving: list[int], group: ContextGroup) -> tuple[torch.Tensor, ...]:
    """Send elements to each rank of the group; return those that came from each."""
    # Bytes, since not all backends send all types.
    wire, width = sent.contiguous().view(torch.uint8), sent.element_size()
    sizes = [count * width for count in arriving], [count * width for count in leaving]
    received = wire.new_empty(sum(sizes[0]))
    group.collectives.all_to_all(received, wire, group.process_group, sizes).wait()
    group.received += received.numel() - sizes[0][group.rank]
    return received.view(sent.dtype).split(arriving)


def prepare_scans(modules: Iterable[nn.Module]) -> None:
    """Let the scans that models call run by channel, where that is proven.

    Args:
        modules: of a model, all that this rank runs.
    """
    for module in modules:
        for name, value in list(vars(module).items()):
            if _is_scan(name, value):
                setattr(module, name, ByChannel(value))
    # Models call them by the names of their own files.
    for name in {type(module).__module__ for module in modules}:
        names = vars(sys.modules[name]) if name in sys.modules else {}
        for found, value in list(names.items()):
            if _is_scan(found, value):
                names[found] = ByChannel(value)


def _is_scan(name: str, value: Any) -> bool:
    return isinstance(value, types.FunctionType) and _SCANS.search(value.__name__ or name) is not None
