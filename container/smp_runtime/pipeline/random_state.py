"""Random numbers of a task: the generators are the process's, so every task brings its own state when it runs."""

from __future__ import annotations

import hashlib

import torch


class RandomState:
    """The state of the CPU's generator, and of this rank's GPU, between the segments of a task.

    Args:
        seed: where the task's random numbers begin.
        device: of this rank.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed: int | None = seed
        self._gpu = device if device.type == "cuda" else None
        self._cpu_state: torch.Tensor | None = None
        self._gpu_state: torch.Tensor | None = None

    @classmethod
    def of_now(cls, device: torch.device) -> RandomState:
        """The generators' present state."""
        state = cls(0, device)
        state._seed = None
        state.capture()
        return state

    def restore(self) -> None:
        """Put this state into the generators."""
        if self._seed is not None:
            torch.default_generator.manual_seed(self._seed)
            if self._gpu is not None:
                torch.cuda.default_generators[self._gpu.index or 0].manual_seed(self._seed)
            self._seed = None
            return
        if self._cpu_state is not None:
            torch.default_generator.set_state(self._cpu_state)
        if self._gpu is not None and self._gpu_state is not None:
            torch.cuda.set_rng_state(self._gpu_state, self._gpu)

    def capture(self) -> None:
        """Take the state of the generators."""
        self._cpu_state = torch.default_generator.get_state()
        if self._gpu is not None:
            self._gpu_state = torch.cuda.get_rng_state(self._gpu)


def task_seed(seed: int, replica: int, microbatch: int, module: str, nth: int = 0) -> int:
    """The seed of a task: equal wherever the module is placed, different for everything else.

    Args:
        seed: of the step, drawn from the script's generator.
        replica: data parallel rank.
        microbatch: number of the microbatch.
        module: path of the module; empty for the step function.
        nth: how often the microbatch has called it before.
    """
    text = f"{seed}/{replica}/{microbatch}/{module}/{nth}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
