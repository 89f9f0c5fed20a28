"""A model's call under context parallelism: its inputs are cut, and a step's outputs are whole again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_runtime.context import functions, packed_masks
from smp_runtime.context.exchange import ContextGroup
from smp_runtime.context.layout import zigzag
from smp_runtime.context.proofs.function_gradients import take_with_whole_gradient, with_mean_gradient
from smp_runtime.context.rules import flexible
from smp_runtime.context.sequence import ShardedSequence
from smp_runtime.context.travel import let_travel
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.nested import argument_tensors, map_leaves
from smp_runtime.tensors.random_state import OtherGenerators

if TYPE_CHECKING:
    from collections.abc import Callable

    from smp_runtime.job.ranks import Ranks

logger = logging.getLogger("smp")

#: On a GPU the first inputs are compared, and then one in so many: a comparison waits for the device.
_COMPARED_FIRST, _COMPARED_EVERY = 16, 16

#: Words in the names of arguments that stay whole: attention reads all of them, and what they are added to cuts the rest.
WHOLE = ("mask", "position")


class SequenceInputs:
    """Cuts the inputs of a model's calls over the ranks of a context group.

    Inputs with token numbers ``[batch, tokens]``, and with features ``[batch, tokens, width]``, are cut along their tokens.
    Which ones are cut decides what is computed where, and never a result: any tensor may be cut or whole.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._group = ContextGroup.of(ranks)
        self._ranks = ranks
        self._calls = 0
        self._reported: set[str] = set()
        functions.install()
        flexible.install()
        packed_masks.install()
        let_travel(self._group)
        ranks.step.leave = make_whole

    @classmethod
    def of(cls, ranks: Ranks) -> SequenceInputs | None:
        """Return the job's, or None without context parallelism."""
        return ranks.keep(cls, lambda: cls(ranks)) if ranks.size(Group.CONTEXT) > 1 else None

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments with sequences in place of tensors that have tokens.

        Raises:
            SMPUserError: the ranks of the group were given different inputs.
        """
        self._report()
        self._compare(args, kwargs)
        cut_args = tuple(map_leaves(self._cut_tensor, value) for value in args)
        cut_kwargs = {
            name: map_leaves(self._keep if any(word in name for word in WHOLE) else self._cut_tensor, value)
            for name, value in kwargs.items()
        }
        return cut_args, cut_kwargs

    def agree(self, length: int, describe: Callable[[], Any]) -> list[Any]:
        """Check that the group's ranks hold slices of sequences of one length, and let their random numbers be the same.

        Args:
            describe: returns more that the ranks tell each other.

        Returns:
            What each rank of the group has told; nothing in calls that are not compared.
        """
        self._report()
        return self._compare((torch.tensor([length]),), {}, describe)

    def _cut_tensor(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, ShardedSequence):
            return value
        has_features = value.is_floating_point()
        if value.dtype is torch.bool or value.dim() != 2 + has_features or value.shape[1] < 2 * self._group.size:
            return self._keep(value)
        layout = zigzag(value.shape[1], self._group.size)
        local = take_with_whole_gradient(value, 1, layout, self._group)
        return ShardedSequence(local, 1, layout, self._group)

    def _keep(self, value: Any) -> Any:
        """Return an input that stays whole; a script may read its gradient, which is that of one process."""
        if not isinstance(value, torch.Tensor) or isinstance(value, ShardedSequence):
            return value
        return with_mean_gradient(value, self._group)

    def _compare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], describe: Callable[[], Any] = lambda: None
    ) -> list[Any]:
        """Compare the inputs of the group's ranks, let their random numbers be those of the first, and exchange ``describe()``.

        Python's and NumPy's too: a model that leaves out layers at random must leave out the same ones on all ranks.
        """
        self._calls += 1
        is_due = self._calls <= _COMPARED_FIRST or self._calls % _COMPARED_EVERY == 0
        if self._ranks.device.type != "cpu" and not is_due:
            return []
        tensors = argument_tensors((args, kwargs))
        mine = torch.tensor([*digest(tensors), *_random_state(self._ranks.device)], dtype=torch.float64)
        # Scripts seldom seed Python's and NumPy's generators, so the first rank always tells theirs.
        others = OtherGenerators().numbers()
        words = mine.tolist(), describe(), others if self._group.rank == 0 else None
        told = self._ranks.control.allgather(words, self._ranks.members(Group.CONTEXT))
        everyone = [numbers for numbers, _, _ in told]
        for place, theirs in enumerate(everyone):
            if theirs[:3] != everyone[0][:3]:
                members = self._ranks.members(Group.CONTEXT)
                raise SMPUserError(
                    f"context_parallel_degree is {self._group.size}, so the ranks {members} share each sequence out, but rank "
                    f"{members[place]} called the model with another batch than rank {members[0]}: give each sampler "
                    "num_replicas=smp.dp_size() and rank=smp.dp_rank(), and all ranks of a group one seed for the order",
                    code="SMP310",
                )
        if any(theirs[3:] != everyone[0][3:] for theirs in everyone):
            self._agree_on_random_numbers()
        of_first = told[0][2]
        if of_first is not None and of_first != others:
            OtherGenerators.of_numbers(of_first).restore(draws=False)
        return [more for _, more, _ in told]

    def _agree_on_random_numbers(self) -> None:
        """Take over the state of the first rank's generators: dropout must drop the same elements on all ranks."""
        states = [torch.get_rng_state()]
        if self._ranks.device.type == "cuda":
            states.append(torch.cuda.get_rng_state())
        first = self._ranks.control.allgather(
            [state.tolist() for state in states] if self._group.rank == 0 else None, self._ranks.members(Group.CONTEXT)
        )[0]
        if first is None:  # in a rehearsal, where no rank was there to say it
            return
        torch.set_rng_state(torch.tensor(first[0], dtype=torch.uint8))
        if len(first) > 1:
            torch.cuda.set_rng_state(torch.tensor(first[1], dtype=torch.uint8))
        if "random" not in self._reported and self._group.rank == 0:
            self._reported.add("random")
            logger.info(
                "Context parallelism: ranks that share sequences out were seeded differently, and use the first one's seed"
            )

    def _report(self) -> None:
        """Log the operations that gathered whole sequences in the calls before, once each."""
        if self._ranks.rank:
            return
        for name, size in self._group.gathered.items():
            if name not in self._reported:
                self._reported.add(name)
                logger.info("Context parallelism: %s gathers sequences, %s bytes per rank so far", name, f"{size:,}")


def digest(tensors: list[torch.Tensor]) -> list[float]:
    """Return three numbers that differ where tensors do."""
    count, total, weighted = 0, 0.0, 0.0
    for tensor in tensors:
        numbers = tensor.detach().reshape(-1)
        numbers = (numbers.abs() if numbers.is_complex() else numbers).double()
        weights = torch.arange(1, numbers.numel() + 1, dtype=torch.float64, device=numbers.device).remainder_(9973.0)
        count += numbers.numel()
        sums = torch.stack([numbers.sum(), (numbers * weights).sum()]).tolist()
        total, weighted = total + sums[0], weighted + sums[1]
    return [float(count), _comparable(total), _comparable(weighted)]


def _comparable(value: float) -> float:
    """Return a number that equals itself also where a value is not a number."""
    return value if value == value else float("inf")


def _random_state(device: torch.device) -> list[float]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state())
    weights = [torch.arange(1, len(state) + 1, dtype=torch.float64) for state in states]
    return [float((state.double() * weight).sum()) for state, weight in zip(states, weights, strict=True)]


def make_whole(results: Any) -> Any:
    """Return what a step has returned as the script's other code can read it."""
    return map_leaves(
        lambda leaf: leaf.whole("the step's output") if isinstance(leaf, ShardedSequence) else leaf, results
    )
