"""Random numbers of an emulated device: drawn when work is queued, as on a GPU, and so the same in every order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

#: Held while the default generator of the host stands in for that of a device.
lock = threading.RLock()


@contextlib.contextmanager
def from_state(state: torch.Tensor) -> Iterator[None]:
    """Draw from the default generator as if it were in another state."""
    # All threads share the generator, and one of them runs the work of streams.
    with lock:
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(state)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


@contextlib.contextmanager
def draw_from(generator: torch.Generator) -> Iterator[None]:
    """Draw from a device's generator where the operation takes the default one."""
    with from_state(generator.get_state()):
        yield
        generator.set_state(torch.default_generator.get_state())


def keep_random_state(
    func: Any, run: Callable[[list[Any]], Any], real: list[Any], generator: torch.Generator
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context for queued work that draws the random numbers of now, and advance the generator at once.

    Args:
        run: the operation ``func`` on flat arguments.
        real: the arguments of the work; a generator among them is replaced.
        generator: of the device.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return contextlib.nullcontext
    # How many numbers are drawn depends on shapes alone: a run on other elements lets the generator go on.
    instead = [torch.full_like(leaf, 0.5) if isinstance(leaf, torch.Tensor) else leaf for leaf in real]
    given = next((position for position, leaf in enumerate(real) if isinstance(leaf, torch.Generator)), None)
    if given is not None:
        state = real[given].get_state()
        run(instead)
        real[given] = torch.Generator()
        real[given].set_state(state)
        return contextlib.nullcontext
    state = generator.get_state()
    with draw_from(generator):
        run(instead)
    return lambda: from_state(state)
