"""The state of a wrapped model as a dictionary: whole, or this stage's part, saved and loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from smp_config import Group
from smp_runtime.errors import SMPUserError
from smp_runtime.model.stages import StagedModel
from smp_runtime.parameters.slices import part_of
from smp_runtime.replacement.placing import whole_state
from smp_runtime.tensor_parallel.group import TensorGroup

PARTIAL_KEY = "_smp_is_partial"


class SavedModel(StagedModel):
    """A wrapped model with a ``state_dict`` of the module inside, wherever its parts are."""

    #: What was loaded before the parameters had a place, in order.
    _waiting: list[Callable[[], Any]]

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> Any:
        """The full state under the unwrapped module's names.

        With pipeline or tensor parallelism every rank of a model parallel group calls it.

        Args:
            gather_to_rank0: only the first rank of each model parallel group gets it, the others ``{}``.
        """
        return self._gathered(self._local_state(*args, **kwargs), gather_to_rank0)

    def state_to_save(self) -> dict[str, Any]:
        """The full state on the first rank of the job, what had to be gathered on the CPU; every rank calls it.

        The others get ``{}``: they only take part, with one flat unit at a time.
        """
        keeps = self._ranks.rank_in(Group.RDP) == 0
        local = self._local_state(keep=keeps)
        return self._gathered(local, True) if keeps else {}

    def _gathered(self, local: dict[str, Any], to_first: bool) -> Any:
        """The full state from that of this rank, on all ranks of a model parallel group, or on the first."""
        session = self._session
        state = whole_state(self.module, local, TensorGroup.of(session.ranks), to_first=to_first)
        if to_first and session.ranks.rank_in(Group.TP) != 0:
            return {}
        if self._stage_of is not None:
            mine, members = {k: _on_cpu(v) for k, v in state.items()}, session.ranks.members(Group.PP)
            exchange = session.ranks.control.gather if to_first else session.ranks.control.allgather
            parts = exchange(mine, members)
            if parts is None:
                return {}
            order = list(self.module.state_dict(keep_vars=True))
            merged = {name: value for part in parts for name, value in part.items()}
            state = {name: state.get(name, merged[name]) for name in order if name in merged}
        return state

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state of this rank's stage, marked by the key ``_smp_is_partial``."""
        return {**self._local_state(*args, **kwargs), PARTIAL_KEY: True}

    def _local_state(self, *args: Any, keep: bool = True, **kwargs: Any) -> dict[str, Any]:
        with self.shards.reading_state() if self.shards is not None else contextlib.nullcontext():
            state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        if self.shards is not None:
            self.shards.complete(state, lambda p: self.registry.record_of(p).names, kwargs.get("prefix", ""), keep)
        if self._stage_of is None:
            return state
        prefix = kwargs.get("prefix", "")
        return {name: value for name, value in state.items() if self._is_local(_owner(name.removeprefix(prefix)))}

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        same_partition_load: bool = False,
        assign: bool = False,
    ) -> Any:
        """Load a full or partial state; names may carry the ``module.`` prefix of other wrappers.

        Before the model is partitioned, a state is kept and loaded when its parameters have a place.
        """
        partial = PARTIAL_KEY in state_dict
        state = {name: value for name, value in state_dict.items() if name != PARTIAL_KEY}
        own = self.module.state_dict(keep_vars=True)
        if state and not own.keys() & state.keys() and all(name.startswith("module.") for name in state):
            state = {name.removeprefix("module."): value for name, value in state.items()}
        if assign and (self._reducer is not None or self.optimizer_shards is not None or not self.partitioned):
            raise SMPUserError(
                "load_state_dict(assign=True) replaces parameters, which gradient reduction and the optimizer already know; "
                "leave assign at False"
            )
        if not self.partitioned and (partial or any(p.is_meta for p in self.module.parameters())):
            kept = dict(state_dict)
            self._waiting.append(lambda: self.load_state_dict(kept, strict=strict))
            return torch.nn.modules.module._IncompatibleKeys([], [])
        result = self._load(state, strict, assign, own)
        for record in self.registry:  # masters take a float32 state unrounded
            shard = (self.optimizer_shards or {}).get(record.parameter)
            value = next((state[name] for name in record.names if name in state), None)
            if shard is not None and isinstance(value, torch.Tensor):
                shard.take(part_of(record, value))
        return result

    def _load(self, state: dict[str, Any], strict: bool, assign: bool, own: Mapping[str, Any]) -> Any:
        if self._stage_of is None:
            return self.module.load_state_dict(state, strict=strict, assign=assign)
        here = {name: value for name, value in state.items() if self._is_local(_owner(name)) or name not in own}
        missing, unexpected = self.module.load_state_dict(here, strict=False)
        missing = [name for name in missing if self._is_local(_owner(name))]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"the state does not fit stage {self._stage} of the {type(self.module).__name__}: missing {missing}, unexpected "
                f"{unexpected}; load the state of this model, or pass strict=False"
            )
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)

    def load_when_partitioned(self, load: Callable[[], Any]) -> None:
        """Call ``load`` when the parameters have a place."""
        self._waiting.append(load)

    def _load_what_waited(self) -> None:
        """The parameters have a place: load what came before."""
        waiting, self._waiting = self._waiting, []
        for load in waiting:
            load()


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
