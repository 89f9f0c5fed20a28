"""Hooks through which a wrapped model is checked while it is laid out and trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from smp_runtime.job.ranks import Ranks
    from smp_runtime.parameters.precision import Precision


class Invariants:
    """Checks that do nothing, for a job without invariant checks.

    ``smp_tools/numerics/invariants.py`` keeps a subclass in its place, unless ``check_invariants`` is false. ``part`` is the
    part of the model on this rank (:class:`.LocalPart`), and ``placed`` is the strategies' result for it
    (:class:`.ParallelState`).
    """

    outlives_regrouping = True

    def check_replaced(self, originals: Mapping[str, nn.Parameter], module: nn.Module) -> None:
        """Check that the parts of tensor parallel ranks are those of ``originals``; all ranks of the group call it."""

    def note_whole(self, part: Any, precision: Precision) -> None:
        """Remember the parameters' values before they are cut into shards."""

    def check_shards(self, part: Any, placed: Any) -> None:
        """Check that the shards hold the values that :meth:`note_whole` has seen; all ranks of the stage call it."""

    def begin_again(self) -> None:
        """Count the next steps as first steps: a model was laid out."""

    def begin_pass(self, part: Any, placed: Any, inputs: Any = None) -> None:
        """Begin a training pass.

        Args:
            inputs: of the model, where no step has shown them.
        """

    def note_losses(self, outputs: Sequence[torch.Tensor]) -> None:
        """Take the losses of a backward pass."""

    def news(self, part: Any) -> int:
        """Return a number that all data parallel ranks add up before a training pass, and then :meth:`hear`."""
        return 0

    def hear(self, total: int, part: Any, placed: Any) -> None:
        """Take the sum of the ranks' :meth:`news`; all data parallel ranks call it at the same moment."""


def invariants_of(ranks: Ranks) -> Invariants:
    """Return the checks of this job."""
    return ranks.keep(Invariants, Invariants)
