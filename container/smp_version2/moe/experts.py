"""Experts that are divided over the ranks: a list of modules, or one module with parameters of many experts."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_version2.moe.exchange import ExpertGroup, combine, repeat_rows, run_experts


class SharedExperts(nn.Module):
    """A module whose parameters belong to this rank's experts.

    Attributes:
        experts: how many there are on all ranks; each has as many, in the order of the ranks.
        group: the ranks that share them out.
        is_sharded: whether FSDP averages their gradients over the ranks that have the same experts.
        is_tried: whether tokens are run in two parts, as those of two ranks may be.
    """

    experts: int
    group: ExpertGroup
    is_sharded: bool
    is_tried: bool

    def begin(self, experts: int) -> None:
        """Have all experts on this rank, until :meth:`share_out` is called."""
        self.experts, self.group, self.is_sharded, self.is_tried = experts, ExpertGroup(1, 0, None), False, False

    def run(self, rows: torch.Tensor, own: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Run this rank's experts; see :data:`smp_version2.moe.exchange.LocalExperts`."""
        if not self.is_tried:
            return self._run(rows, own, sizes)
        made = torch.empty_like(rows)
        for part in (slice(0, None, 2), slice(1, None, 2)):
            made[part] = self._run(rows[part], own[part], own[part].bincount(minlength=len(self.here)).tolist())
        return made

    def _run(self, rows: torch.Tensor, own: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        raise NotImplementedError

    @property
    def here(self) -> range:
        """Return the numbers of this rank's experts."""
        count = self.experts // self.group.size
        return range(self.group.rank * count, (self.group.rank + 1) * count)

    def check(self) -> None:
        """Raise an error if a pass with gradients begins, and nothing would average them over the right ranks."""
        if self.group.size > 1 and not self.is_sharded and torch.is_grad_enabled():
            raise SMPUserError(
                "the experts of this model are shared out (expert_parallel_degree), and only FullyShardedDataParallel and "
                "fully_shard average their gradients over the ranks with the same experts: give the transformed model to one of "
                "them, not to DistributedDataParallel, before it is called",
                code="SMP303",
            )

    def whole_names(self, name: str, rank: int) -> str:
        """Return the name that a parameter of this rank's has on another rank of the group."""
        return name

    def cut(self, rank: int) -> range:
        """Return the numbers of another rank's experts."""
        count = self.experts // self.group.size
        return range(rank * count, (rank + 1) * count)


class ListedExperts(SharedExperts):
    """This rank's part of a list of experts; each keeps its name."""

    def __init__(self, whole: nn.ModuleList | nn.ModuleDict) -> None:
        super().__init__()
        for name, expert in whole.named_children():
            self.add_module(name, expert)
        self.names = [name for name, _ in whole.named_children()]
        self.begin(len(self.names))

    def share_out(self, group: ExpertGroup) -> None:
        """Drop the experts of other ranks."""
        self.group = group
        for number, name in enumerate(self.names):
            if number not in self.here:
                delattr(self, name)

    def forward(self, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return the results of the experts ``numbers``, ``[r]``, for the rows ``[r, h]``; all ranks of the group call it."""
        self.check()
        return run_experts(rows, numbers, self.experts, self.group, self.run)

    def _run(self, rows: torch.Tensor, own: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        order = torch.argsort(own, stable=True)
        # An expert without rows is called too: its parameters need gradients, like those of other ranks.
        parts = zip(self.children(), rows[order].split(sizes), strict=True)
        results = torch.cat([expert(part) for expert, part in parts])
        return results.new_empty(results.shape).index_copy(0, order, results)

    def whole_names(self, name: str, rank: int) -> str:
        """Return the name of the expert at the same place on another rank."""
        expert, _, rest = name.partition(".")
        place = self.names.index(expert) - self.here.start
        return f"{self.names[self.cut(rank).start + place]}.{rest}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        others = tuple(f"{prefix}{name}." for name in self.names if name not in self._modules)
        for key in [key for key in state_dict if others and key.startswith(others)]:
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args)


class TabledExperts(SharedExperts):
    """A module with parameters ``[experts, …]``, and the ``forward`` of its own class for this rank's experts."""

    def share_out(self, group: ExpertGroup) -> None:
        """Drop the experts of other ranks."""
        self.group = group
        if group.size == 1:
            return
        here = self.here
        for name, parameter in list(self.named_parameters(recurse=False)):
            part = parameter.detach()[here.start : here.stop].clone()
            setattr(self, name, nn.Parameter(part, parameter.requires_grad))
        for name, buffer in list(self.named_buffers(recurse=False)):
            setattr(self, name, buffer[here.start : here.stop].clone())
        self.whole_numbers = {
            name: value
            for name, value in vars(self).items()
            if type(value) is int and value == self.experts and "expert" in name and name != "experts"
        }
        for name in self.whole_numbers:
            setattr(self, name, len(here))

    def make_whole(self, device: torch.device) -> nn.Module:
        """Return a module like this one was before, with parameters of all experts without values."""
        made = copy.copy(self)
        made.__class__ = type(self).__bases__[1]  # see class_in_front
        vars(made).update(self.whole_numbers if self.group.size > 1 else {})
        made._parameters = {}
        slices = getattr(self, "tensor_slices", {})
        for name, parameter in self.named_parameters(recurse=False):
            shape = slices[name].shape if name in slices else (self.experts, *parameter.shape[1:])
            value = torch.empty(shape, dtype=parameter.dtype, device=device)
            made.register_parameter(name, nn.Parameter(value, parameter.requires_grad))
        return made

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of the results of each token's experts; all ranks of the group call it.

        The arguments are those of the module's own class: tokens, the experts of each, and their weights.
        """
        self.check()
        given = inspect.signature(super().forward).bind(*args, **kwargs).arguments
        hidden_states, choices, weights = given.values()
        k = choices.shape[-1]
        # Some classes take a weight of each token for every expert, with zeros.
        self.takes_all_weights = weights.shape[-1] == self.experts != k
        if self.takes_all_weights:
            weights = weights.reshape(-1, self.experts).gather(1, choices.reshape(-1, k))
        rows = repeat_rows(hidden_states.reshape(-1, hidden_states.shape[-1]), k)
        results = run_experts(rows, choices.flatten(), self.experts, self.group, self.run)
        return combine(results, weights.reshape(-1, k)).view_as(hidden_states)

    def _run(self, rows: torch.Tensor, own: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        count = rows.shape[0]
        if not count:  # parameters need gradients even so, like those of other ranks
            rows, own = rows.new_zeros(1, rows.shape[1]), own.new_zeros(1)
        weights = rows.new_ones(rows.shape[0], 1)
        if self.takes_all_weights:
            weights = rows.new_zeros(rows.shape[0], len(self.here)).scatter_(1, own[:, None], 1.0)
        results: torch.Tensor = super().forward(rows, own[:, None], weights)
        return results.reshape(rows.shape)[:count]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        here = self.here
        for name, tensor in (*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)):
            given = state_dict.get(prefix + name)
            if isinstance(given, torch.Tensor) and given.shape == (self.experts, *tensor.shape[1:]):
                state_dict[prefix + name] = given[here.start : here.stop]
        super()._load_from_state_dict(state_dict, prefix, *args)


#: Classes that :func:`class_in_front` has made, so that equal modules have one class.
_MADE: dict[tuple[Any, Any], Any] = {}


def class_in_front(front: Any, kind: Any) -> Any:
    """Return a class with the name of ``kind`` that has the methods of ``front`` before those of ``kind``."""
    if (front, kind) not in _MADE:
        _MADE[front, kind] = type(
            kind.__name__, (front, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__}
        )
    return _MADE[front, kind]


def to_tables(module: nn.Module, experts: int) -> TabledExperts:
    """Let a module with parameters of many experts run those of one rank, all of them for now."""
    module.__class__ = class_in_front(TabledExperts, type(module))
    made: Any = module
    made.begin(experts)
    found: TabledExperts = made
    return found


def find_experts(model: nn.Module) -> Iterator[SharedExperts]:
    """Yield the modules of a model whose experts ranks share out."""
    for module in model.modules():
        if isinstance(module, SharedExperts) and module.group.size > 1:
            yield module


def find_own_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of experts that other ranks do not have."""
    found: set[nn.Parameter] = set()
    for experts in find_experts(model):
        found.update(experts.parameters())
    return found
