"""Random numbers of the emulated devices: they are drawn by the CPU's generator, so that one is seeded and kept."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from smp_emulation.calls import CoveredCall, answer_each, answer_with
from smp_emulation.devices import count, index_of, real_device


def _get_state(device: Any = "cuda") -> torch.Tensor:
    index_of(device)
    return torch.default_generator.get_state()


def _get_states() -> list[torch.Tensor]:
    return [_get_state(index) for index in range(count())]


def _set_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    index_of(device)
    torch.default_generator.set_state(new_state)


def _set_states(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        # States saved on a host with more devices have no device here.
        if index < count():
            _set_state(state, index)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _seed() -> None:
    torch.default_generator.seed()


def _initial_seed() -> int:
    return torch.default_generator.initial_seed()


class _GeneratorType(type(torch.Generator)):  # type: ignore[misc]
    """So that generators of PyTorch's own making count as the replaced class's, too."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, type(torch.default_generator))


def _generator(original: Any) -> Any:
    if not isinstance(original, type):
        return original

    @functools.wraps(original, updated=())
    class Generator(original, metaclass=_GeneratorType):
        def __new__(cls, device: Any = "cpu") -> Any:
            return original.__new__(cls, real_device(device))

    return Generator


_SHARED = "the CPU's generator"

CALLS = (
    *answer_each("torch.cuda", ("manual_seed", "manual_seed_all"), _SHARED, _manual_seed),
    *answer_each("torch.cuda", ("seed", "seed_all"), _SHARED, _seed),
    answer_with("torch.cuda.initial_seed", _SHARED, _initial_seed),
    answer_with("torch.cuda.get_rng_state", _SHARED, _get_state),
    answer_with("torch.cuda.get_rng_state_all", _SHARED, _get_states),
    answer_with("torch.cuda.set_rng_state", _SHARED, _set_state),
    answer_with("torch.cuda.set_rng_state_all", _SHARED, _set_states),
    CoveredCall("torch.cuda.default_generators", _SHARED, lambda original: (torch.default_generator,) * count()),
    CoveredCall("torch.Generator", "a generator of the CPU", _generator),
)
