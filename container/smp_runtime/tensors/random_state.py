"""Random numbers of a task: the generators are the process's, so every task brings its own state when it runs."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch


def generator_of(device: torch.device) -> torch.Generator:
    """Return PyTorch's own generator of a CPU or CUDA device; "cuda" without a number is the current one."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[number_of(device)]


def number_of(gpu: torch.device) -> int:
    """Return the number of a CUDA device, which "cuda" alone leaves to the current one."""
    return torch.cuda.current_device() if gpu.index is None else gpu.index


class RandomState:
    """The state of the CPU's generator, and of this rank's GPU, between the segments of a task; it begins with a seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed: int | None = seed
        self._gpu = device if device.type == "cuda" else None
        self._cpu_state: torch.Tensor | None = None
        self._gpu_state: torch.Tensor | None = None

    @classmethod
    def of_now(cls, device: torch.device) -> RandomState:
        """Return the current state of the generators."""
        state = cls(0, device)
        state._seed = None
        state.capture()
        return state

    def restore(self) -> None:
        """Put this state into the generators."""
        if self._seed is not None:
            torch.default_generator.manual_seed(self._seed)
            if self._gpu is not None:
                generator_of(self._gpu).manual_seed(self._seed)
            self._seed = None
            return
        if self._cpu_state is not None:
            torch.default_generator.set_state(self._cpu_state)
        if self._gpu is not None and self._gpu_state is not None:
            torch.cuda.set_rng_state(self._gpu_state, self._gpu)

    def is_as(self, other: RandomState) -> bool:
        """Return whether a script draws the same numbers from either state."""
        return _are_equal(self._cpu_state, other._cpu_state) and _are_equal(self._gpu_state, other._gpu_state)

    def on(self, device: torch.device) -> RandomState:
        """Return the same state, maybe of another rank, for the generators of ``device``."""
        made = RandomState(0, device)
        made._seed, made._cpu_state, made._gpu_state = self._seed, self._cpu_state, self._gpu_state
        return made

    def capture(self) -> None:
        """Take the state of the generators."""
        self._cpu_state = torch.default_generator.get_state()
        if self._gpu is not None:
            self._gpu_state = torch.cuda.get_rng_state(self._gpu)


class OtherGenerators:
    """Python's and NumPy's generators as they are now.

    During a step they belong to the stage. Afterwards every rank continues where its script was, after one more draw. So
    scripts that draw the same numbers continue to do so, although their ranks have run different modules.
    """

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = _numpy_random()
        self._numpy = None if numpy is None else numpy.get_state()

    def numbers(self) -> list[list[float]]:
        """Return the generators' states as numbers: of Python's, then of NumPy's if a script uses it."""
        _, python, gauss = self._python
        found: list[list[float]] = [[*python, *([] if gauss is None else [gauss])]]
        if self._numpy is not None:
            _, keys, *rest = self._numpy
            found.append([*keys.tolist(), *rest])
        return found

    @classmethod
    def of_numbers(cls, numbers: list[list[float]]) -> OtherGenerators:
        """Return generators with the states of :meth:`numbers`, maybe of another rank; NumPy's stays if these have none."""
        made = cls()
        ours = numbers[0]
        version, count = made._python[0], len(made._python[1])
        words = tuple(int(number) for number in ours[:count])
        # Python's generator keeps the second of two normal numbers for the next call.
        next_normal = ours[count] if len(ours) > count else None
        made._python = version, words, next_normal
        if len(numbers) > 1 and made._numpy is not None:
            *keys, place, has_gauss, cached = numbers[1]
            made._numpy = "MT19937", [int(key) for key in keys], int(place), int(has_gauss), cached
        return made

    def restore(self, *, draws: bool = True) -> None:
        """Put them back, and draw once unless the script itself goes on from there."""
        random.setstate(self._python)
        numpy = None if self._numpy is None else _numpy_random()
        if numpy is not None:
            numpy.set_state(self._numpy)
        if draws:
            random.random()
            if numpy is not None:
                numpy.random_sample()


def seed_other_generators(seed: int) -> None:
    """Begin the random numbers of Python and NumPy anew; microbatches share them."""
    random.seed(seed)
    if (numpy := _numpy_random()) is not None:
        numpy.seed(seed % 2**32)


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def task_seed(seed: int, replica: int, microbatch: int, module: str, nth: int = 0) -> int:
    """Return the seed of a task: the same on any stage, but different for any other arguments.

    Args:
        seed: of the step, drawn from the script's generator.
        replica: data parallel rank.
        module: path of the module; empty for the step function.
        nth: how often the microbatch has called it before.
    """
    text = f"{seed}/{replica}/{microbatch}/{module}/{nth}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or torch.equal(one, other)
