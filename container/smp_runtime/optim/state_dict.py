"""The state of a wrapped optimizer as a dictionary: whole, this stage's or this rank's part, saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime.errors import SMPAttributeError, SMPUserError
from smp_runtime.optim.kinds.expected_state import refuse_state_of_others
from smp_runtime.optim.whole_state import (
    HALF_KEY,
    NAMES_KEY,
    copy_state,
    load_state,
    of_all_stages,
    own_parts,
    refuse_other_parameters,
    whole_state,
    whole_values,
)
from smp_runtime.parameters.registry import part_of
from smp_runtime.tensors.host_memory.snapshot import wait_for_copies

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.job.session import Session
    from smp_runtime.job.trained import TrainedModel
    from smp_runtime.optim.loss_scaling import LossScaler
    from smp_runtime.parameters.optimizer_shards import OptimizerShard
    from smp_runtime.parameters.registry import ParameterRecord

#: Marks a state that has this stage's parameters only.
PARTIAL_KEY = "_smp_is_partial"
#: Marks a state that holds this rank's shard only.
SHARD_KEY = "_smp_is_shard"


class SavedOptimizer(torch.optim.Optimizer):
    """A wrapped optimizer with a ``state_dict`` of the inner one, wherever its parts are."""

    optimizer: torch.optim.Optimizer
    loss_scaler: LossScaler
    overflow: bool
    _norm: torch.Tensor | None
    dynamic_loss_scale: bool
    _session: Session
    _ranks: Ranks
    _model: TrainedModel | None
    _originals: list[list[nn.Parameter]]
    _optimizer_shards: list[OptimizerShard]

    @property
    def loss_scale(self) -> float:
        """Return the factor that losses are multiplied by before backward."""
        return self.loss_scaler.scale

    @property
    def gradient_norm(self) -> float | None:
        """Return the norm of the whole gradient as the last clipping measured it; None if nothing was clipped."""
        return None if self._norm is None else float(self._norm)

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last step was skipped; ``accelerate`` reads this."""
        return self.overflow

    def original_groups(self) -> list[list[nn.Parameter]]:
        """Return the script's own parameters by parameter group, for all stages and ranks."""
        if self._model is not None:
            return [list(parameters) for parameters in self._originals]
        return [list(group["params"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the full state, numbered and shaped as in one process without half precision.

        If tensor parallelism has replaced a Transformers model by its own, numbers and shapes are those of the replacement's
        parameters. Their names are under ``smp_param_names``. A full checkpoint has the numbers and shapes of one process.

        Sharded state is gathered over the data parallel group. With tensor and pipeline parallelism the state is gathered
        over the ranks of a replica. So every rank of these groups calls this.
        """
        state = self._gathered_state(to_first=False)
        if not self._session.module_manager.translate_functions:
            return state
        records = self._session.records
        names = []
        for group in self.original_groups():
            parameters = dict.fromkeys(group)
            names.append([records[parameter].name if parameter in records else "" for parameter in parameters])
        return {**state, NAMES_KEY: names}

    def _gathered_state(self, *, to_first: bool) -> dict[str, Any]:
        """Gather :meth:`state_dict` on every rank, or only on the first rank of the job.

        In the second case, the other ranks' results are meaningless.
        """
        ranks, keeps = self._ranks, not to_first or self._ranks.rank_in(Group.RDP) == 0
        state = self._stage_state(keep=keeps)
        if not keeps:
            return {}
        if ranks.size(Group.TP) > 1:
            parameters, records = self._parameters(), self._session.records
            state = {**state, "state": whole_values(ranks, records, parameters, state["state"], to_first=to_first)}
        if ranks.size(Group.PP) == 1 or self._model is None:
            return state
        merged = of_all_stages(ranks, state["state"], to_first=to_first)
        return {**state, "state": {number: state["state"].get(number, merged[number]) for number in sorted(merged)}}

    def full_state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:
        """Return :meth:`state_dict` plus, in half precision, the whole float32 weights and the loss scale.

        These are under ``fp16_states``. Every rank of the job calls it.

        Args:
            gather_to_rank0: only the first rank of the job gets it; the others take part, and get ``{}``.
        """
        ranks = self._ranks
        to_first = gather_to_rank0
        first = ranks.rank == 0 or not to_first
        keeps = not to_first or ranks.rank_in(Group.RDP) == 0
        # Both gather over ranks, so every rank calls both, whether it keeps the result or not.
        state = self._gathered_state(to_first=to_first)
        half = self.fp16_states(keep=keeps)
        if self._model is None or not half or not keeps:
            return state if first else {}
        masters = self._whole_masters(half["masters"], list(self._model.registry), to_first=to_first)
        if not first:
            return {}
        return {**state, HALF_KEY: {**half, "masters": masters}}

    def _whole_masters(
        self, masters: Mapping[str, torch.Tensor], records: Sequence[ParameterRecord], *, to_first: bool
    ) -> dict[str, torch.Tensor]:
        """Gather the float32 weights of all tensor parallel ranks and stages, which call this together."""
        # Numbered by the registry, which is the same on all ranks.
        # A rank may lack the master of a parameter that another rank keeps whole.
        values: dict[int, dict[str, torch.Tensor]] = {}
        for number, record in enumerate(records):
            if record.name in masters:
                values[number] = {"master": masters[record.name]}
        parameters = [record.parameter for record in records]
        whole = whole_values(self._ranks, self._session.records, parameters, values, to_first=to_first)
        found = {records[number].name: value["master"] for number, value in whole.items()}
        if self._ranks.size(Group.PP) > 1:
            found = of_all_stages(self._ranks, found, to_first=to_first)
        return found

    def _parameters(self) -> list[nn.Parameter]:
        """Return the model's parameters by their number in a state."""
        parameters: dict[nn.Parameter, None] = {}
        for group in self.original_groups():
            parameters.update(dict.fromkeys(group))
        return list(parameters)

    def stage_state(self) -> dict[str, Any]:
        """Return the state of this stage's parameters, with their numbers in the whole state; marked as partial."""
        return {**self._stage_state(), PARTIAL_KEY: True}

    def _stage_state(self, *, keep: bool = True) -> dict[str, Any]:
        if self._model is None:
            return self.optimizer.state_dict()
        gatherer, optimizer_shards = self._model.sharded_state, self._model.optimizer_shards or {}
        return whole_state(self.optimizer, self._originals, optimizer_shards, gatherer, keep=keep)

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """Return the state of this rank's stage, marked by the key ``_smp_is_partial``.

        Args:
            gather_if_shard: False returns this rank's shard only, to be loaded with the same number of ranks.
        """
        if not gather_if_shard:
            return {**self.optimizer.state_dict(), PARTIAL_KEY: True, SHARD_KEY: True}
        states = self.fp16_states()
        return {**self.stage_state(), **({HALF_KEY: states} if states else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any], gather_if_shard: bool = True) -> None:
        """Load a full state, saved with any number of ranks and any precision, or a rank's own state.

        Args:
            state_dict: from :meth:`state_dict` or :meth:`local_state_dict`.
            gather_if_shard: accepted because scripts pass it to the calls that save; the state itself shows its origin.

        Raises:
            CheckpointError: it is of other parameters, or of another kind of optimizer.
        """
        besides = (PARTIAL_KEY, SHARD_KEY, HALF_KEY, NAMES_KEY)
        state = {key: value for key, value in state_dict.items() if key not in besides}
        if SHARD_KEY not in state_dict:
            refuse_other_parameters(self._session.records, self._parameters(), state_dict)
        found: Mapping[Any, Any] = state.get("state", {})
        refuse_state_of_others(self.optimizer, state.get("param_groups", ()), found.values(), "the state_dict")
        if HALF_KEY in state_dict:
            self.load_fp16_states(state_dict[HALF_KEY])
        if self._ranks.size(Group.TP) > 1 and SHARD_KEY not in state_dict:
            state = own_parts(self._session.records, self._parameters(), state)
        if self._model is None or SHARD_KEY in state_dict:
            self.optimizer.load_state_dict(copy_state(state, self._ranks.device))
        else:
            load_state(self.optimizer, self._originals, self._model.optimizer_shards or {}, state)

    def fp16_states(self, *, keep: bool = True) -> dict[str, Any]:
        """Return float32 master weights by parameter name, and the state of loss scaling; empty without half precision.

        With sharded state they are gathered, so every rank of the data parallel group calls it. A rank without ``keep``
        gets no weights.
        """
        model = self._model
        if model is None or not model.precision.is_half:
            return {}
        model.adopt_writes()
        masters = {shard.parameter: shard.optimized.detach() for shard in self._optimizer_shards}
        if model.sharded_state is not None:
            masters = model.sharded_state.gather_whole(masters, keep=keep)
        names = {model.registry.record_of(parameter).name: value for parameter, value in masters.items()}
        state: dict[str, Any] = {"masters": names}
        if self._ranks.cfg.fp16:
            state["loss_scaler"] = self.loss_scaler.state_dict()
        return state

    @torch.no_grad()
    def load_fp16_states(self, states: Mapping[str, Any]) -> None:
        """Continue from saved master weights and loss scale."""
        if not states:
            return
        self.load_loss_scale(states.get("loss_scaler"))
        if self._model is None or not self._model.precision.is_half:
            for model in self._session.models:  # in full precision they are the weights
                model.load_state_dict(states["masters"], strict=False)
            return
        for shard in self._optimizer_shards:
            record = self._model.registry.record_of(shard.parameter)
            master = states["masters"].get(record.name)
            if master is None:
                continue
            wait_for_copies()
            shard.optimized.copy_(shard.part_of(part_of(record, master)))

    def load_loss_scale(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a saved loss scale; it only means something to fp16, and one that the script fixed stays."""
        scales_by_itself = self._ranks.cfg.fp16 and self.dynamic_loss_scale
        saved = state or {}
        if scales_by_itself and "overflows_left" in saved:
            self.loss_scaler.load_state_dict(saved)

    # -- what older helper scripts call ----------------------------------------------------------------------------

    def save_optimizer_backcompat(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """Return :meth:`local_state_dict`."""
        return self.local_state_dict(gather_if_shard=gather_if_shard)

    def load_optimizer_backcompat(self, state_dict: Mapping[str, Any], gather_if_shard: bool = True) -> None:
        """Call :meth:`load_state_dict`."""
        self.load_state_dict(state_dict, gather_if_shard)

    def _param_id_to_index(self) -> dict[int, int]:
        """Return the number of each of the model's parameters in a state, by the parameter's ``id``."""
        return {id(parameter): number for number, parameter in enumerate(self._parameters())}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse ``copy.deepcopy``, ``pickle`` and ``torch.save``.

        Raises:
            SMPUserError: always.
        """
        raise SMPUserError(
            f"smp.DistributedOptimizer around {type(self.optimizer).__name__} cannot be copied or pickled, since it updates "
            "parameters that lie on several ranks; use optimizer.state_dict(), called on every rank, and load_state_dict of "
            "another optimizer, or smp.save_checkpoint",
            code="SMP304",
        )

    # -- what scripts read under sharded data parallelism; without it these attributes do not exist ----------------

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """Return the model's trained parameters, by parameter group."""
        self._require_shards("fp16_groups")
        return self.original_groups()

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """Return, for each parameter group, a flat float32 copy of the elements that this rank updates."""
        self._require_shards("fp32_partitioned_groups_flat")
        updated = {shard.parameter: shard.optimized.detach() for shard in self._optimizer_shards}
        parts = [[updated[p].reshape(-1).float() for p in group if p in updated] for group in self._originals]
        return [torch.cat(found) if found else torch.empty(0, device=self._ranks.device) for found in parts]

    @property
    def ds_param_shard_group(self) -> torch.distributed.ProcessGroup:
        """Return the process group of the ranks that share one copy of the parameters."""
        self._require_shards("ds_param_shard_group")
        return self._ranks.process_group(Group.SHARD)

    def _require_shards(self, name: str) -> None:
        if self._model is None or self._model.shards is None:
            raise SMPAttributeError(f"{name} exists under sharded data parallelism only", code="SMP304")
