"""Operations of a model's replicas besides reducing gradients: equal weights, equal buffers, uneven batches."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from smp_config import Group
from smp_runtime.comm.collectives import broadcast_tensors
from smp_runtime.data_parallel.uneven_batches import JoinedModel
from smp_runtime.errors import SMPUserError
from smp_runtime.job.invariants import invariants_of

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.model.gradient_accumulation import GradientAccumulation
    from smp_runtime.model.local_part import LocalPart, ParallelState

#: Ranks that have changed shards are counted in units of one, what :class:`.Invariants` add up in units of this.
_GATHERING = 1 << 20


class Replicas:
    """The data parallel ranks of a model, seen from one of them.

    Args:
        broadcasts_buffers: whether buffers are copied from the first replica at every training step.

    Attributes:
        are_equal: whether replicas have the same weights already when they are placed.
    """

    def __init__(
        self,
        part: LocalPart,
        placed: ParallelState,
        ranks: Ranks,
        accumulation: GradientAccumulation,
        *,
        broadcasts_buffers: bool,
    ) -> None:
        self._part = part
        self._placed = placed
        self._ranks = ranks
        self._accumulation = accumulation
        self._broadcasts_buffers = broadcasts_buffers
        self._checks = invariants_of(ranks)
        self._joined: JoinedModel | None = None
        self.loads = 0
        self.are_equal = False

    @property
    def are_joined(self) -> bool:
        """Return whether ranks may be done already, inside :meth:`join`."""
        return self._joined is not None

    def begin_training_pass(self, inputs: Any = None) -> None:
        """Share loaded state and buffers before a training step; all data parallel ranks call it.

        Args:
            inputs: of the model, outside steps.
        """
        if self._placed.is_away:
            is_copied = self._placed.is_copied
            has_left = self._placed.optimizer_shards is not None and not is_copied
            goes_on = (
                "its weights have left those that the optimizer updates" if has_left else "call model.cuda() first"
            )
            what = "put a whole copy of the model on" if is_copied else "moved the model to"
            raise SMPUserError(
                f"model.cpu() has {what} the CPU, but this rank trains {'its part ' if is_copied else ''}on "
                f"{self._ranks.device}; {goes_on}, or model.eval() to evaluate it, or save model.state_dict() without moving the "
                "model",
                code="SMP303",
            )
        if self._placed.known is not None:
            self._placed.known.check()
        for parameter in self._placed.frozen:
            if parameter.requires_grad:
                name = self._part.registry.record_of(parameter).name
                raise SMPUserError(
                    f"{name} was frozen when the model was wrapped and has requires_grad now; nothing would average its "
                    "gradient: unfreeze it before smp.DistributedModel, and freeze it after, if it must change",
                    code="SMP303",
                )
        if self._placed.sharded_state is not None:
            self._placed.sharded_state.take_back_gradients()
        if self._joined is not None:  # announce it to ranks that may be done already
            Join.notify_join_context(self._joined)
        self._checks.begin_pass(self._part, self._placed, inputs)
        self.share_loaded_state()
        self._refresh_buffers()

    def share_loaded_state(self) -> None:
        """Copy a state that only some ranks have loaded to the others, before the next step."""
        if not self._accumulation.reduces:
            return
        group, members = self._ranks.groups.group(Group.DP), self._ranks.members(Group.DP)
        mine = self._ranks.rank_in(Group.DP)
        state, news = self._placed.sharded_state, torch.zeros(len(members) + 1, dtype=torch.int64, device="cpu")
        # Ranks that are done do not answer, and a hook of the script may leave each replica with gradients of its own.
        is_checked = not self.are_joined and self._accumulation.hook is None
        asked = self._checks.news(self._part) if is_checked else 0
        news[mine], news[-1] = self.loads, int(self._placed.must_gather) + _GATHERING * asked
        self._ranks.collectives.all_reduce(news, group).wait()
        self._placed.must_gather = False
        asked, gathering = divmod(int(news[-1]), _GATHERING)
        if state is not None and gathering > 0:  # the script has changed what some rank's optimizer updates
            state.gather_parameters()
        self._share_loads(news[:-1], members)
        if is_checked:
            self._checks.hear(asked, self._part, self._placed)

    def _share_loads(self, counts: torch.Tensor, members: list[int]) -> None:
        """Copy the state of the rank that has loaded most often.

        Args:
            counts: how often each data parallel rank has loaded a state.
        """
        if bool((counts == counts[0]).all()):
            return
        if self._placed.shards is not None:
            self._placed.shards.refuse_partial_load(counts.tolist())
        source = int(counts.argmax())
        self._copy_all(members[source])
        self.loads = int(counts.max())
        if self._ranks.rank_in(Group.DP) != source:
            self._placed.refresh()

    def agree(self) -> None:
        """Make weights and buffers equal on all data parallel ranks, as at the beginning of the next training step.

        All data parallel ranks call it.
        """
        self.share_loaded_state()
        self._refresh_buffers()

    def follow_loads(self) -> None:
        """Make any ``load_state_dict`` inside the model, also of a submodule, reach master weights and replicas."""
        noted = _NotedLoads(self)
        for part in self._part.module.modules():
            # Past a ScriptModule, which refuses its own method but calls the hooks.
            nn.Module.register_load_state_dict_post_hook(part, noted)

    def note_load(self) -> None:
        """Record that a state was loaded on this rank."""
        self.loads += 1
        self._placed.refresh()

    def _refresh_buffers(self) -> None:
        if self._broadcasts_buffers and self._accumulation.reduces:
            self.copy(self._part.buffers())

    def _copy_all(self, source: int) -> None:
        self.copy([*self._part.parameters(), *self._part.buffers()], source)

    def copy(self, tensors: Iterable[torch.Tensor], source: int | None = None) -> None:
        """Copy tensors from a rank of the data parallel group, default the first; split ones from its counterpart."""
        ranks = self._ranks
        if source is None:
            source = ranks.members(Group.DP)[0]
        split = {id(record.parameter) for record in self._part.registry if record.placement.tensor_axis is not None}
        tensors = list(tensors)
        shared = [tensor for tensor in tensors if id(tensor) not in split]
        parts = [tensor for tensor in tensors if id(tensor) in split]
        broadcast_tensors(shared, source, ranks.groups.group(Group.DP), ranks.collectives)
        if ranks.size(Group.RDP) > 1:
            counterpart = ranks.members(Group.RDP)[ranks.topology.rank_in(Group.RDP, source)]
            broadcast_tensors(parts, counterpart, ranks.groups.group(Group.RDP), ranks.collectives)

    @contextlib.contextmanager
    def join(self, divide_by_initial_world_size: bool, enable: bool) -> Iterator[None]:
        """See :meth:`.DistributedModel.join`."""
        if not divide_by_initial_world_size:
            raise SMPUserError(
                "join() divides gradients by all ranks; divide_by_initial_world_size=False is not supported",
                code="SMP303",
            )
        if self._placed.sharded_state is not None and enable:
            raise SMPUserError(
                "join() lets ranks skip updates, but with shard_optimizer_state every rank updates a part of each parameter; "
                "turn shard_optimizer_state off, or give all ranks the same number of batches",
                code="SMP303",
            )
        if self._ranks.cfg.fp16 and enable:
            raise SMPUserError(
                "join() lets ranks leave the loop, but with fp16 all ranks agree on overflows in every step; use bf16, or "
                "give all ranks the same number of batches",
                code="SMP303",
            )
        if self._ranks.cfg.fp8 and enable:
            raise SMPUserError(
                "join() lets ranks leave the loop, but with fp8 all ranks agree on scales in every update; turn fp8 off, or give "
                "all ranks the same number of batches",
                code="SMP303",
            )
        if not self._accumulation.reduces or not enable:
            yield
            return
        self._joined = JoinedModel(self, self._ranks.groups.group(Group.DP), self._ranks.device)
        self._accumulation.is_joined = True
        try:
            with Join([self._joined]):
                yield
        finally:
            self._joined = None
            self._accumulation.is_joined = False

    def shadow_step(self) -> None:
        """Answer the collectives of one step of the others, with nothing to add."""
        self.share_loaded_state()
        self._refresh_buffers()
        if self._accumulation.reduces:
            self._accumulation.open()
            gradients = [parameter.grad for parameter in self._part.parameters()]
            for parameter in self._part.parameters():
                parameter.grad = None
            self._accumulation.finish_pass()
            for parameter, gradient in zip(self._part.parameters(), gradients, strict=True):
                parameter.grad = gradient
            self._accumulation.open()

    def take_over(self, is_last: bool) -> None:
        """Copy the weights of a rank that was among the last to be done; every rank calls it."""
        members = self._ranks.members(Group.DP)
        done_last = self._ranks.control.allgather(is_last, members)
        self._copy_all(members[done_last.index(True)])
        self._placed.refresh()


class _NotedLoads:
    """A hook that records loads; copies of it, in copied or saved modules, record nothing."""

    def __init__(self, replicas: Replicas | None = None) -> None:
        self._replicas = None if replicas is None else weakref.ref(replicas)

    def __call__(self, *_: Any) -> None:
        replicas = None if self._replicas is None else self._replicas()
        if replicas is not None:
            replicas.note_load()

    def __reduce__(self) -> tuple[type[_NotedLoads], tuple[()]]:
        return _NotedLoads, ()
