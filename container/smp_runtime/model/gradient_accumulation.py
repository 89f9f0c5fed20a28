"""The window of gradients that one reduction covers: the backward passes of a step, or of several."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from smp_config import Group
from smp_runtime.data_parallel.bucket_transports import Deliver, HookTransport, Peers
from smp_runtime.data_parallel.reducer import Reducer, make_reducer
from smp_runtime.data_parallel.uneven_batches import BackwardAgreement
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.torch_private import at_end_of_backward

if TYPE_CHECKING:
    import torch
    from torch import nn

    from smp_runtime.job.ranks import Ranks
    from smp_runtime.parameters.registry import ParameterRegistry
    from smp_runtime.sharding.sharded_parameters import ShardedParameters
    from smp_runtime.sharding.sharded_state import ShardedState

#: Passes per reduction inside ``no_sync``.
_NEVER = 2**62


class GradientAccumulation:
    """The windows of a model in which gradients are reduced, and the ranks that take part.

    Args:
        trains: whether the model is in training mode, with gradients.
        passes_per_reduction: backward passes that accumulate gradients before one reduction.

    Attributes:
        shards: the sharded part of the model, reduced in the same windows; or None.
        is_joined: whether ranks may be done already, inside :meth:`.DistributedModel.join`.
        hook: a communication hook and its state, which :meth:`install_hook` puts in place; or None.
    """

    def __init__(
        self,
        ranks: Ranks,
        trains: Callable[[], bool],
        *,
        passes_per_reduction: int,
        bucket_bytes: int,
        overlap: bool,
        bucket_view: bool,
    ) -> None:
        self._ranks = ranks
        self._trains = trains
        self._passes_per_reduction = passes_per_reduction
        self.bucket_bytes = bucket_bytes
        self._overlap = overlap
        self._bucket_view = bucket_view
        self._passes = 0
        #: Passes since the last reduction. Their gradients are this rank's own. A step that raised may have added some, too.
        self._unreduced = 0
        self._closing_is_queued = False
        self.is_joined = False
        self._reducer: Reducer | None = None
        self._deliver: Deliver | None = None
        self.hook: tuple[Any, Callable[..., Any]] | None = None
        self._agreement: BackwardAgreement | None = None
        self.shards: ShardedParameters | None = None

    @property
    def reduces(self) -> bool:
        """Return whether gradients are reduced at all."""
        return self._reducer is not None

    @property
    def bucket_order(self) -> list[list[int]]:
        """Return the indices of the parameters of each bucket, for tests and reports."""
        return [] if self._reducer is None else self._reducer.bucket_order

    def watch_backward(self, trained: Sequence[nn.Parameter]) -> None:
        """Announce to the other ranks when backward begins in a step; without a step, it is a window of its own.

        Call it before anything else watches the gradients: the others must know before gradients are sent.
        """
        ranks = self._ranks
        agreement = BackwardAgreement(
            ranks.collectives, ranks.groups.group(Group.DP), ranks.rank_in(Group.DP), ranks.size(Group.DP)
        )
        self._agreement = agreement
        ranks.groups.let_end(lambda: agreement.is_under_way)
        # Parameters hold their hooks, and outlive this window if the script goes on with them.
        weak = weakref.ref(self)

        def gradient_comes(_: torch.Tensor) -> None:
            if ranks.step.microbatch is not None:
                agreement.tell()
            elif (window := weak()) is not None:
                window.close_after_backward()

        if self.shards is not None:  # gathers parameters before the first gradient comes
            self.shards.uses.backward_begins = agreement.tell
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(gradient_comes)

    def reduce(
        self,
        registry: ParameterRegistry,
        trained: Sequence[nn.Parameter],
        bucket_bytes: int,
        dtype: torch.dtype | None,
        state: ShardedState | None,
        sparse: Sequence[nn.Parameter] = (),
    ) -> None:
        """Create the reducer of the gradients of ``trained``, and begin the first window.

        Args:
            registry: determines over which ranks each is averaged.
            trained: parameters that are whole on this rank.
            dtype: type in which gradients are summed; None means in their own type.
            state: shares out optimizer state, so that gradients go to their owners only; or None.
            sparse: parameters with sparse gradients.
        """
        self._deliver = state.deliver_whole if state else None
        self._reducer = make_reducer(
            registry,
            trained,
            self._ranks,
            sparse=sparse,
            bucket_bytes=bucket_bytes,
            reduce_dtype=dtype,
            buckets=state.buckets if state else None,
            transport=state,
            overlap=self._overlap,
            bucket_view=self._bucket_view,
        )
        self.open()
        self._reduce_for_readers(state or self.shards)

    def _reduce_for_readers(self, state: ShardedState | ShardedParameters | None) -> None:
        """Reduce accumulated gradients as soon as the script reads or sets a gradient that lies in shards."""
        weak = weakref.ref(self)

        def reduce() -> None:
            window = weak()
            if window is not None and window.is_incomplete:
                window._unreduced = 0  # noqa: SLF001 - of this class
                window._reduce_now()  # noqa: SLF001 - of this class

        if state is not None:
            state.script_gradients.reduce = reduce

    def install_hook(self) -> None:
        """Let the script's communication hook average the gradients, instead of an all-reduce or reduce-scatter.

        Raises:
            SMPUserError: there are no replicas, parameters are sharded too, or the hook averages over other ranks.
        """
        if self.hook is None:
            return
        if self._reducer is None or self.shards is not None:
            how = "averages the gradients of replicas, but this job"
            why = "has no data parallelism over several ranks"
            if self.shards is not None:
                why = (
                    "shards parameters too, so that no rank ever has whole gradients; use shard_optimizer_state instead of "
                    "sharded_data_parallel_degree, or no hook"
                )
            raise SMPUserError(f"register_comm_hook {how} {why}", code="SMP303")
        ranks = self._ranks
        if self._deliver is not None and ranks.size(Group.TP) > 1 and not ranks.cfg.prescaled_batch:
            raise SMPUserError(
                "register_comm_hook averages a bucket over one group of ranks, but with shard_optimizer_state and a batch per rank "
                f"of {ranks.size(Group.TP)} tensor parallel ranks distributed and ordinary layers have different ones; set "
                '"prescaled_batch": True, or register no hook',
                code="SMP303",
            )
        state, hook = self.hook

        def transport(parameters: Sequence[torch.Tensor], peers: Peers) -> HookTransport:
            _check_group(state, hook, peers.group)
            return HookTransport(state, hook, parameters, peers, self._deliver)

        self._reducer.use_transport(transport)

    def open(self) -> None:
        """Open a window: gradients that come from now on belong to the next pass.

        That pass reduces them if it completes a group of passes.
        """
        if self._reducer is not None:
            self._reducer.begin_window(reduces=self._completes(self._passes + 1))
        if self.shards is not None:
            self.shards.begin_window("train" if self._trains() else "evaluate")

    def open_after_failure(self) -> None:
        """Drop the leftovers of a backward pass that raised an error, before a training pass outside steps."""
        if self._closing_is_queued:
            self._closing_is_queued = False
            self.open()

    def begin_step(self, *, agrees: bool) -> None:
        """Begin a step; with ``agrees``, the ranks find out together if any of them runs backward in it."""
        if self._agreement is not None and agrees:
            self._agreement.open()
        self.open()

    def finish_step(self) -> bool:
        """Reduce gradients after all microbatches; return whether backward ran on this rank.

        If gradients are not reduced at all, it returns True.
        """
        if self._reducer is None:
            return True
        trained = self._reducer.touched
        if self.shards is not None and self.shards.touched:
            trained = True
        if self._anyone_trained(trained):
            self.finish_pass()
        self.open()
        return trained

    def abandon_step(self) -> None:
        """Abandon a step in which a microbatch raised an error: its gradients are not reduced."""
        if self._agreement is not None:
            self._agreement.abandon()
        # Its backward passes may have added gradients before the error.
        self._unreduced += self._trains()
        self.open()

    def finish_pass(self) -> None:
        """Sum gradients after backward; they are ready for the update if this completes a group of passes."""
        self._passes += 1
        completes = self._completes(self._passes)
        self._unreduced = 0 if completes else self._unreduced + 1
        if self._reducer is not None:
            self._reducer.finish_window()
        if self.shards is not None:
            self.shards.finish_window(reduces=completes)

    @property
    def is_incomplete(self) -> bool:
        """Return whether gradients have accumulated that are not reduced; the same on every rank."""
        return self._unreduced > 0 and self._reducer is not None

    def complete(self) -> None:
        """Reduce the gradients of an incomplete group of passes, before an update; every rank calls it.

        Inside :meth:`no_sync` a script updates with each rank's own gradients on purpose.

        Raises:
            SMPUserError: ranks may be done already, and would not take part; or it is called inside :meth:`no_sync` with
                sharded state.
        """
        unreduced = self._unreduced
        if not unreduced or self._reducer is None:
            return
        if self._passes_per_reduction == _NEVER:
            if self.shards is None and self._deliver is None:
                self._unreduced = 0
                return
            raise SMPUserError(
                "optimizer.step() or clipping came inside model.no_sync(), where gradients are not averaged, but with sharded "
                "state each rank updates its part of every weight for all of them; run the last backward pass before the update "
                "outside no_sync()",
                code="SMP303",
            )
        self._unreduced = 0
        if self.is_joined:
            raise SMPUserError(
                f"optimizer.step() came after {unreduced} of backward_passes_per_step={self._passes_per_reduction} passes inside "
                "model.join(), where ranks that are done cannot reduce these gradients; update after complete groups of passes "
                "only, or leave backward_passes_per_step out",
                code="SMP303",
            )
        self._reduce_now()
        self._passes = 0

    def _reduce_now(self) -> None:
        """Reduce the accumulated gradients; every rank calls it. Later passes of the group add to them."""
        assert self._reducer is not None
        self._reducer.begin_window(reduces=True)
        self._reducer.finish_window(measures=False)
        if self.shards is not None:
            self.shards.finish_window(reduces=True)
        self.open()

    @contextlib.contextmanager
    def forward(self, *, evaluates: bool) -> Iterator[None]:
        """Run a forward pass in the block; with ``evaluates`` it is a window of its own.

        Sharded parameters are gathered as they are used.
        """
        step, shards = self._ranks.step, self.shards
        if shards is None:
            before, step.is_in_forward = step.is_in_forward, True
            try:
                yield
            finally:
                step.is_in_forward = before
            return
        if evaluates:
            self.open()
        before, step.is_in_forward = step.is_in_forward, True
        try:
            with shards.forward():
                yield
        except BaseException:
            if evaluates:  # forget its order, and free the parameters it gathered
                shards.abandon_window()
                self.open()
            raise
        finally:
            step.is_in_forward = before
        if evaluates:
            shards.finish_window(reduces=False)
            self.open()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of backward passes inside without reducing them; for loops without ``smp.step``."""
        before, self._passes_per_reduction = (self._passes_per_reduction, self._passes), _NEVER
        self.open()
        try:
            yield
        finally:
            self._passes_per_reduction, self._passes = before
            self.open()

    def _completes(self, passes: int) -> bool:
        return passes % self._passes_per_reduction == 0

    def close_after_backward(self) -> None:
        """Close the window when the running backward pass ends: a gradient has come outside a step."""
        if not self._closing_is_queued:
            self._closing_is_queued = True
            at_end_of_backward(self._close)

    def _close(self) -> None:
        """Finish a backward pass outside a step."""
        self._closing_is_queued = False
        if self._reducer is not None:
            self.finish_pass()
            self.open()

    def _anyone_trained(self, trained: bool) -> bool:
        """Return whether a data parallel rank has run backward in this step, so that all must reduce.

        Raises:
            SMPUserError: others have, but this rank has not, and they needed its parameters.
        """
        if self._agreement is None:
            return trained
        positions = self._agreement.close(trained)
        if positions and self.shards is not None and self._ranks.rank_in(Group.DP) not in positions:
            others = [self._ranks.members(Group.DP)[position] for position in positions]
            raise SMPUserError(
                f"rank {self._ranks.rank} ran no backward pass in this step, but the data parallel ranks {others} did, and with "
                "sharded data parallelism they need its part of the parameters then; run backward on every rank, of a loss "
                "multiplied by 0 where a rank has nothing to learn",
                code="SMP303",
            )
        return bool(positions)


def _check_group(state: Any, hook: Callable[..., Any], group: dist.ProcessGroup) -> None:
    """Refuse a hook that is known to average over other ranks than those with replicas of the parameters.

    Raises:
        SMPUserError: names both.
    """
    given = state if isinstance(state, dist.ProcessGroup) else getattr(state, "process_group", None)
    if given is None and getattr(hook, "__module__", "").startswith("torch.distributed."):
        given = dist.group.WORLD  # PyTorch's own default
    if given is None:
        return
    theirs, wanted = dist.get_process_group_ranks(given), dist.get_process_group_ranks(group)
    if sorted(theirs) != sorted(wanted):
        raise SMPUserError(
            f"the communication hook averages over the ranks {theirs}, but of some parameters only the ranks {wanted} have "
            "replicas; give it smp.get_dp_process_group(), or with tensor parallelism take a hook of smp.comm_hooks, whose state "
            "needs no group",
            code="SMP303",
        )
