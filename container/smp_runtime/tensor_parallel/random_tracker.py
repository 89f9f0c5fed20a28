"""Random numbers of tensor parallel layers: some must agree over the group, the others must not.

Dropout on a replicated activation must drop the same elements on every rank; on what only this rank has (its heads,
its slice) it must be independent. A script may seed its ranks alike or differently, so neither follows from the
default generator: the tracker derives both from a number that the group's first rank drew.

Recomputation in backward (activation checkpointing) must repeat the forward pass. PyTorch restores the default
generator for it, so the tracker draws a *mark* from there: a mark that it has seen before asks for the same numbers
again. Uses are counted separately for each microbatch, since a pipeline may run
microbatches in another order in each step.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_runtime.parameters.deferred_creation import Deferral
from smp_runtime.tensors.random_state import generator_of

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks, StepState
    from smp_runtime.tensor_parallel.group import TensorGroup

#: Marks kept for recomputation; one per dropout of a training step.
_REMEMBERED = 2**16
#: In place of a microbatch, outside a step.
_OUTSIDE = -1


class RandomTracker:
    """Two families of random numbers, switched on around an operation that draws from the default generator.

    Args:
        base: the number from which both derive, the same on every rank of the group.
        step: state of the step: the running microbatch, and whether this rank runs alone. Such uses are not
            counted.
    """

    def __init__(self, base: int, rank: int, step: StepState) -> None:
        self._base = base
        self._step = step
        self._rank = rank
        self._uses: Counter[int] = Counter()
        self._marks: OrderedDict[int, tuple[int, int]] = OrderedDict()

    @classmethod
    def of(cls, group: TensorGroup) -> RandomTracker:
        """Return the tracker of a group; all ranks call it together the first time, as distributed modules do."""
        found = group.ranks.kept(cls)
        if found is None and group.is_tracing:  # alone, before parameters that are created later have values
            return cls(0, group.rank, group.ranks.step)
        if found is None:
            state = torch.get_rng_state()
            # Replicas that draw the same weights, or are seeded alike, drop out different elements all the same.
            base = mix_seeds(
                group.agree(draw_seed()),
                group.ranks.topology.coordinates(group.ranks.rank).rdp // group.ranks.size(Group.CONTEXT),
            )
            torch.set_rng_state(state)  # a script's own numbers do not depend on which module was the first
            found = group.ranks.keep(cls, lambda: cls(base, group.rank, group.ranks.step))
        return found

    @classmethod
    def prepare(cls, group: TensorGroup) -> None:
        """Make the tracker of a group, with numbers from this place in a model's creation, also where that is deferred."""
        deferral = Deferral.current()
        if deferral is None:
            cls.of(group)
        elif group.ranks.kept(cls) is None:
            deferral.later(cls.of, group)

    def replicated(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Draw the same random numbers inside the block on every rank of the group."""
        return self._seeded(device, 0)

    def split(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Draw independent random numbers inside the block on every rank of the group."""
        return self._seeded(device, 1 + self._rank)

    @contextlib.contextmanager
    def _seeded(self, device: torch.device, stream: int) -> Iterator[None]:
        if device.type == "meta":  # no values, no random numbers
            yield
            return
        seed = mix_seeds(self._base, *self._use(), stream)
        generator = generator_of(device)
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)

    def _use(self) -> tuple[int, int]:
        """Return the microbatch and the number of this use, or of the forward pass that it repeats."""
        mark = draw_seed()
        if self._step.is_tracing:
            return 0, 0
        if mark not in self._marks:
            microbatch = _OUTSIDE if self._step.microbatch is None else self._step.microbatch
            self._uses[microbatch] += 1
            self._marks[mark] = microbatch, self._uses[microbatch]
            if len(self._marks) > _REMEMBERED:
                self._marks.popitem(last=False)
        return self._marks[mark]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for :meth:`load_state_dict`."""
        return {"base": self._base, "uses": dict(self._uses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`.

        Older states counted all microbatches together; they continue with other numbers.
        """
        base, uses = state["base"], state["uses"]
        self._base, self._uses = (base, Counter(uses)) if isinstance(uses, dict) else (mix_seeds(base, uses), Counter())
        self._marks.clear()


def tracker_state(ranks: Ranks, state: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the state of a job's tracker for a checkpoint; if ``state`` is passed, load it first."""
    found = ranks.kept(RandomTracker)
    if found is None:
        return None
    if state is not None:
        found.load_state_dict(state)
    return found.state_dict()


def draw_seed() -> int:
    """Draw a seed from the default generator of the CPU."""
    return int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))


def mix_seeds(*numbers: int) -> int:
    """Return a seed that depends on all of ``numbers``, with the finalizer of splitmix64.

    Close numbers lead to seeds that are far apart.
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state >> 1
