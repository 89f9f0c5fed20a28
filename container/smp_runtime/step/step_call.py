"""How a rank has called a step: all ranks of a pipeline must call the same one, although only the root stage runs it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch

from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.nested import leaves_of

#: Elements of the first tensor that are added up, to see whether ranks have read the same batch.
_PROBED_ELEMENTS = 4096


class StepCall(NamedTuple):
    """One call of a step function.

    Attributes:
        function: its name.
        modes: whether gradients are recorded, and each model's training flag.
        shapes: of its arguments.
        probe: a sum over the first tensor's first elements; None where nobody has looked.
    """

    function: str
    modes: tuple[bool, ...]
    shapes: Hashable
    probe: float | None

    def check(self, root: StepCall, rank: int, root_rank: int) -> str:
        """Compare this rank's call with the root stage's.

        Returns:
            A warning where the batches differ, which is harmless only if it is meant; empty otherwise.

        Raises:
            SMPUserError: the ranks run different functions, or in different modes.
        """
        if (self.function, self.modes) != (root.function, root.modes):
            raise SMPUserError(
                f"rank {rank} called the step {self.function} ({_described(self.modes)}), but rank {root_rank} of the same "
                f"pipeline called {root.function} ({_described(root.modes)}); every rank of a pipeline runs the same steps in the "
                "same order: branch on smp.dp_rank() or on values that all of them have, not on smp.rank()"
            )
        what = ""
        if self.shapes != root.shapes:
            what = "of other shapes or with other settings"
        elif self.probe != root.probe and not _are_both_nan(self.probe, root.probe):
            what = "with other values"
        return what and (
            f"rank {rank} called the step {self.function} with a batch {what} than rank {root_rank} of the same pipeline; only the "
            "root stage's is used, so a share of the data would be lost: give the sampler num_replicas=smp.dp_size() and "
            "rank=smp.dp_rank()"
        )


def probe(values: Iterable[Any]) -> float | None:
    """A number that differs, as a rule, for batches that do: from the first tensor in arguments of any nesting."""
    first = next((leaf for leaf in leaves_of(list(values)) if isinstance(leaf, torch.Tensor)), None)
    if first is None or type(first) is not torch.Tensor or first.layout != torch.strided:
        return None
    if first.is_meta or first.is_complex():
        return None
    some = first.detach().reshape(-1)[:_PROBED_ELEMENTS].to(torch.float64)
    return float((some * torch.arange(1, len(some) + 1, device=some.device)).sum())


def _are_both_nan(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and math.isnan(one) and math.isnan(other)


def _described(modes: tuple[bool, ...]) -> str:
    gradients, *training = modes
    models = ", ".join("training" if flag else "evaluation" for flag in training) or "no"
    return f"{'with' if gradients else 'without'} gradients, {models} mode"
