"""Mixtures and routers whose classes get another ``forward`` in front."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config.errors import kind_of
from smp_runtime.errors import SMPUserError
from smp_runtime.tensor_parallel.random_tracker import mix_seeds
from smp_version2.moe.balancing import route
from smp_version2.moe.exchange import ExpertGroup, combine, repeat_rows, shuffle
from smp_version2.state import state

if TYPE_CHECKING:
    from smp_version2.moe.config import MoEConfig


class BalancedRouter(nn.Module):
    """A router that returns its results, weights and choices; the last two follow a :class:`MoEConfig`."""

    moe_config: MoEConfig

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the router of this class does, with the balanced choice."""
        logits, weights, choices, *others = super().forward(*args, **kwargs)
        found, chosen = route(logits, choices.shape[-1], self.moe_config, is_training=self.training)
        return logits, found.to(weights.dtype) if self._keeps(weights) else found, chosen, *others

    def _keeps(self, weights: torch.Tensor) -> bool:
        """Return whether weights have a type that is no more exact than the routing's."""
        return weights.dtype in (torch.float16, torch.bfloat16)


class RoutedMixture(nn.Module):
    """A mixture of a linear router and listed experts that routes as a :class:`MoEConfig` says."""

    moe_config: MoEConfig
    part_names: tuple[str, str]
    choices: int
    returns_logits: bool

    def forward(self, hidden_states: torch.Tensor) -> Any:
        """Return the mixture's results, and the router's if the class returns them."""
        router, experts = (self.get_submodule(name) for name in self.part_names)
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = router(flat)
        weights, chosen = route(logits, self.choices, self.moe_config, is_training=self.training)
        results = experts(repeat_rows(flat, self.choices), chosen.flatten())
        made = combine(results, weights).view_as(hidden_states)
        return (made, logits) if self.returns_logits else made


class ReplayedMixture(nn.Module):
    """A mixture with its own routing, whose class calls each expert of a list with the rows of its tokens.

    The routing runs twice: first to learn which rows each expert gets, then with the experts' results.
    """

    part_names: tuple[str, str]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the class returns."""
        experts: Any = self.get_submodule(self.part_names[1])
        names = inner(experts).names
        asked = RecordedCalls(names)
        # Noise on the input is drawn in place, and has to be the same in both passes.
        copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
        with _same_numbers(self), self._with_experts(asked):
            super().forward(*copies, **kwargs)
        if not asked.calls:
            raise SMPUserError(
                f"{kind_of(self)} has called none of its experts; call it with at least one token on every rank",
                code="SMP303",
            )
        rows = torch.cat([rows for _, rows in asked.calls])
        numbers = torch.cat([rows.new_full(rows.shape[:1], at, dtype=torch.long) for at, rows in asked.calls])
        results = experts(rows, numbers).split([rows.shape[0] for _, rows in asked.calls])
        with self._with_experts(AnsweredCalls(names, [at for at, _ in asked.calls], list(results))):
            return super().forward(*args, **kwargs)

    @contextlib.contextmanager
    def _with_experts(self, calls: ExpertCalls) -> Iterator[None]:
        """Put an object in place of the list; the module's own dictionary comes before its submodules."""
        name = self.part_names[1]
        self.__dict__[name] = calls
        try:
            yield
        finally:
            del self.__dict__[name]


def inner(experts: nn.Module) -> Any:
    """Return the module inside a wrapper of FSDP."""
    return getattr(experts, "module", experts)


@contextlib.contextmanager
def _same_numbers(mixture: nn.Module) -> Iterator[None]:
    """Restore the random state afterwards: any routing may draw numbers while it trains."""
    device = state.joined.device
    with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=mixture.training):
        yield


class ExpertCalls:
    """Stands for a list of experts while a mixture runs."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        at = self._names.index(key) if isinstance(key, str) else int(key)
        return functools.partial(self.call, at)

    def call(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """Run one expert."""
        raise NotImplementedError


class RecordedCalls(ExpertCalls):
    """Keeps the rows that experts are called with, and answers zeros."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.calls: list[tuple[int, torch.Tensor]] = []

    def call(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """Keep the rows."""
        if rows.dim() != 2:
            raise SMPUserError(
                f"an expert is called with rows of shape {list(rows.shape)}, and only rows [tokens, features] can be exchanged: "
                "set expert_parallel_degree to 1",
                code="SMP303",
            )
        self.calls.append((number, rows))
        return torch.zeros_like(rows)


class AnsweredCalls(ExpertCalls):
    """Answers calls in the order in which they were recorded."""

    def __init__(self, names: list[str], numbers: list[int], results: list[torch.Tensor]) -> None:
        super().__init__(names)
        self._left = list(zip(numbers, results, strict=True))

    def call(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the recorded call's result."""
        if not self._left or self._left[0][0] != number or self._left[0][1].shape[0] != rows.shape[0]:
            raise SMPUserError(
                "a mixture has called other experts in a second run with the same tokens, so they cannot be exchanged: set "
                "expert_parallel_degree to 1, or take away what draws random numbers in its routing",
                code="SMP303",
            )
        return self._left.pop(0)[1]


class ShuffledMixture(nn.Module):
    """A mixture that gets tokens of all ranks that share its experts out, in random order, while it trains."""

    moe_config: MoEConfig
    shuffle_group: ExpertGroup

    def forward(self, hidden_states: torch.Tensor) -> Any:
        """Return the results of this rank's tokens."""
        if not self.training or self.shuffle_group.size == 1:
            return super().forward(hidden_states)
        group = self.shuffle_group
        # The draw comes from PyTorch's state, which checkpointing restores when it runs a block again.
        drawn = int(torch.randint(2**31, ()))
        seed = mix_seeds(self.moe_config.random_seed + group.rank, drawn)
        mixed, take_back = shuffle(hidden_states.reshape(-1, hidden_states.shape[-1]), seed, group)
        result = super().forward(mixed[None])
        if isinstance(result, tuple):
            first, *others = result
            return (take_back(first[0]).view_as(hidden_states), *map(take_back, others))
        return take_back(result[0]).view_as(hidden_states)
