"""The checks that a job makes of itself unless ``check_invariants`` is false, and their times."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from smp_config import Group
from smp_runtime.job.invariants import Invariants
from smp_tools.numerics.cut_checks import ShardSums, check_tensor_parallel
from smp_tools.numerics.first_steps import FirstSteps
from smp_tools.numerics.replica_checks import compare_copies

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from smp_runtime.job.session import Session
    from smp_runtime.job.trained import TrainedOptimizer
    from smp_runtime.model.local_part import LocalPart, ParallelState
    from smp_runtime.parameters.precision import Precision

#: Updates from one comparison of copies to the next; the first comparison comes after the first update.
EVERY_UPDATES = 1000
#: Updates for which a comparison is asked for: a script with several models and optimizers uses them in turn.
_ASKED_UPDATES = 8
#: A rank that requests a comparison adds 1 to the sum. A rank with finite batch and parameters adds this value.
_FINITE = 1 << 20


class JobInvariants(Invariants):
    """The checks of one job.

    Whether copies are compared is decided by the sum of :meth:`news`, which is the same on all ranks that have copies: one that
    has made fewer updates, or skipped some, takes part in the same comparison.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ranks = session.ranks
        self._updates = 0
        self._moments = 0  # at which copies are compared, so far
        self._is_asking = False  # whether a model may not have been compared since the last moment
        self._compared: weakref.WeakKeyDictionary[LocalPart, int] = weakref.WeakKeyDictionary()
        self._shard_sums = ShardSums(session.ranks)
        self._first = FirstSteps(session)
        self._first.begin_again()
        session.after_step.append(self._after_step)
        session.before_update.append(self._before_update)
        session.after_update.append(self._after_update)

    # -- layout ----------------------------------------------------------------------------------------------------

    def check_replaced(self, originals: Mapping[str, nn.Parameter], module: nn.Module) -> None:
        """See :class:`.Invariants`."""
        check_tensor_parallel(originals, module, self._ranks)

    def note_whole(self, part: LocalPart, precision: Precision) -> None:
        """See :class:`.Invariants`."""
        self._shard_sums.note(part, precision)

    def check_shards(self, part: LocalPart, placed: ParallelState) -> None:
        """See :class:`.Invariants`."""
        self._shard_sums.check(part, placed)

    def begin_again(self) -> None:
        """See :class:`.Invariants`."""
        self._updates = 0
        self._first.begin_again()

    # -- passes ----------------------------------------------------------------------------------------------------

    def begin_pass(self, part: LocalPart, placed: ParallelState, inputs: Any = None) -> None:
        """See :class:`.Invariants`."""
        if self._first.left:
            self._first.begin_pass(part, placed, inputs)

    def note_losses(self, outputs: Sequence[torch.Tensor]) -> None:
        """See :class:`.Invariants`."""
        if self._first.left:
            self._first.note_losses(outputs)

    def news(self, part: LocalPart) -> int:
        """See :class:`.Invariants`."""
        if not self._is_asking and not self._first.left:
            return 0
        is_due = self._compared.get(part, 0) < self._moments
        return is_due + _FINITE * self._first.is_finite

    def hear(self, total: int, part: LocalPart, placed: ParallelState) -> None:
        """See :class:`.Invariants`."""
        if not total:
            return
        finite, due = divmod(total, _FINITE)
        self._first.hear(everyone=finite == self._ranks.size(Group.DP))
        if due:
            self._compared[part] = self._moments
            compare_copies(part, placed, self._ranks, self._updates)

    def _after_step(self, _: Any) -> None:
        if self._first.left:
            self._first.end_step()

    def _before_update(self, optimizer: TrainedOptimizer) -> None:
        if self._first.is_waiting:
            self._first.before_update(optimizer)

    def _after_update(self, optimizer: TrainedOptimizer) -> None:
        if getattr(optimizer, "overflow", False):  # skipped
            return
        self._updates += 1
        since_moment = self._updates % EVERY_UPDATES
        if since_moment == 1:
            self._moments += 1
            self._is_asking = True
        elif since_moment > _ASKED_UPDATES:
            self._is_asking = False
