"""What the replicas of a model do together besides reducing gradients: equal weights, equal buffers, uneven batches."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from smp_config import Group
from smp_runtime.comm.broadcasting import broadcast_tensors
from smp_runtime.data_parallel.joining import JoinedModel
from smp_runtime.data_parallel.reducer_set import Reducer
from smp_runtime.errors import SMPUserError
from smp_runtime.job.ranks import Ranks
from smp_runtime.job.session import Session
from smp_runtime.model.wrapped_names import WrappedNames
from smp_runtime.sharding.sharded_parameters import ShardedParameters
from smp_runtime.sharding.sharded_state import ShardedState


class ReplicatedModel(WrappedNames):
    """A wrapped model that knows its replicas.

    Attributes:
        sharded_state: how optimizer state is shared out over the replicas, or None.
        shards: the same with parameters and gradients too, under sharded data parallelism.
    """

    sharded_state: ShardedState | ShardedParameters | None
    shards: ShardedParameters | None
    _session: Session
    _ranks: Ranks
    _reducer: Reducer | None
    _joined: JoinedModel | None
    _frozen: list[nn.Parameter]
    _broadcasts_buffers: bool
    _loads: int
    _is_away: bool
    _passes: int

    def _open_window(self) -> None:
        raise NotImplementedError

    def _begin_training_pass(self) -> None:
        """What all data parallel ranks do together before a training step."""
        if self._is_away:
            goes_on = (
                "call model.cuda() first"
                if self.optimizer_shards is None
                else "its weights have left those that the optimizer updates"
            )
            raise SMPUserError(
                f"model.cpu() has moved the model to the CPU, but this rank trains on {self._ranks.device}; {goes_on}, or save "
                "model.state_dict() without moving the model"
            )
        for parameter in self._frozen:
            if parameter.requires_grad:
                name = self.registry.record_of(parameter).name
                raise SMPUserError(
                    f"{name} was frozen when the model was wrapped and has requires_grad now; nothing would average its "
                    "gradient: unfreeze it before smp.DistributedModel, and freeze it after, if it must change"
                )
        self._tell_joined()
        self._share_loaded_state()
        self._refresh_buffers()

    def _share_loaded_state(self) -> None:
        """A state that only some ranks loaded reaches the others before the next step."""
        if self._reducer is None:
            return
        group, members = self._ranks.groups.group(Group.DP), self._ranks.members(Group.DP)
        mine = self._ranks.rank_in(Group.DP)
        counts = torch.zeros(len(members), dtype=torch.int64, device="cpu")
        counts[mine] = self._loads
        self._ranks.collectives.all_reduce(counts, group).wait()
        if bool((counts == counts[0]).all()):
            return
        if self.shards is not None:
            self.shards.refuse_partial_load(counts.tolist())
        source = int(counts.argmax())
        self._replicate([*self.local_parameters(), *self.local_buffers()], members[source])
        self._loads = int(counts.max())
        if mine != source:
            self._refresh_masters()

    def _follow_loads(self) -> None:
        """Any ``load_state_dict`` inside the model, also of a submodule, reaches master weights and replicas."""
        weak = weakref.ref(self)

        def loaded(*_: Any) -> None:
            if (model := weak()) is not None:
                model._loads += 1
                model._refresh_masters()

        for part in self.module.modules():
            # Past a ScriptModule, which refuses its own method but calls the hooks.
            nn.Module.register_load_state_dict_post_hook(part, loaded)

    def _refresh_masters(self) -> None:
        """Master weights follow what was written into the model."""
        for shard in (self.optimizer_shards or {}).values():
            if shard is not None:
                shard.refresh()

    def _refresh_buffers(self) -> None:
        if self._broadcasts_buffers and self._reducer is not None:
            self._replicate(self.local_buffers())

    def _replicate(self, tensors: Any, source: int | None = None) -> None:
        """Copy tensors from a rank of the data parallel group, default the first; split ones from its counterpart."""
        session = self._session
        if source is None:
            source = session.ranks.members(Group.DP)[0]
        split = {id(record.parameter) for record in self.registry if record.placement.tensor_axis is not None}
        tensors = list(tensors)
        shared = [tensor for tensor in tensors if id(tensor) not in split]
        parts = [tensor for tensor in tensors if id(tensor) in split]
        broadcast_tensors(shared, source, session.ranks.groups.group(Group.DP), session.ranks.collectives)
        if session.ranks.size(Group.RDP) > 1:
            counterpart = session.ranks.members(Group.RDP)[session.ranks.topology.rank_in(Group.RDP, source)]
            broadcast_tensors(parts, counterpart, session.ranks.groups.group(Group.RDP), session.ranks.collectives)

    @contextlib.contextmanager
    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True) -> Iterator[None]:
        """Train with uneven numbers of steps: a rank that has left the loop answers the others until all have.

        Gradients are divided by the number of all ranks, also of those that are done. At the end every rank has the
        weights of one that trained longest; the optimizer's state of a rank that was done earlier stays behind.

        Args:
            divide_by_initial_world_size: only True is supported.
            enable: False makes the context do nothing.

        Raises:
            SMPUserError: ``divide_by_initial_world_size=False``, or sharded optimizer state, which every rank must update.
        """
        if not divide_by_initial_world_size:
            raise SMPUserError(
                "join() divides gradients by all ranks; divide_by_initial_world_size=False is not supported"
            )
        if self.sharded_state is not None and enable:
            raise SMPUserError(
                "join() lets ranks skip updates, but with shard_optimizer_state every rank updates a part of each parameter; "
                "turn shard_optimizer_state off, or give all ranks the same number of batches"
            )
        if self._ranks.cfg.fp16 and enable:
            raise SMPUserError(
                "join() lets ranks leave the loop, but with fp16 all ranks agree on overflows in every step; use bf16, or "
                "give all ranks the same number of batches"
            )
        if self._reducer is None or not enable:
            yield
            return
        self._joined = JoinedModel(self, self._ranks.groups.group(Group.DP), self._ranks.device)
        try:
            with Join([self._joined]):
                yield
        finally:
            self._joined = None

    def _tell_joined(self) -> None:
        """Announce a training step to ranks that may be done already."""
        if self._joined is not None:
            Join.notify_join_context(self._joined)

    def shadow_step(self) -> None:
        """Answer the collectives of one step of the others, with nothing to add."""
        self._share_loaded_state()
        self._refresh_buffers()
        if self._reducer is not None:
            self._open_window()
            self._passes += 1
            gradients = [parameter.grad for parameter in self.local_parameters()]
            for parameter in self.local_parameters():
                parameter.grad = None
            self._reducer.finish_window()
            for parameter, gradient in zip(self.local_parameters(), gradients, strict=True):
                parameter.grad = gradient
            self._open_window()

    def take_over(self, is_last: bool) -> None:
        """Copy the weights of a rank that was among the last to be done; every rank calls it."""
        members = self._ranks.members(Group.DP)
        done_last = self._ranks.control.allgather(is_last, members)
        source = members[done_last.index(True)]
        self._replicate([*self.local_parameters(), *self.local_buffers()], source)
        self._refresh_masters()
