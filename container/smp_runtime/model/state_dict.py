"""The state of a wrapped model as a dictionary: whole, or this stage's part, saved and loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from smp_config import Group
from smp_runtime.comm.control import RUNTIME_CHANNEL
from smp_runtime.errors import SMPOperationError, SMPUserError
from smp_runtime.microbatch_state.remote_stubs import RemoteStub
from smp_runtime.module_conversion.parameter_layout import slices_by_name, whole_state
from smp_runtime.parameters.deferred_creation import Deferrals
from smp_runtime.parameters.late_values import values_of
from smp_runtime.parameters.registry import part_of
from smp_runtime.tensor_parallel.group import TensorGroup, gather_whole
from smp_runtime.tensors.torch_private import IncompatibleKeys

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.model.local_part import LocalPart, ParallelState

PARTIAL_KEY = "_smp_is_partial"


class TensorShape(NamedTuple):
    """A whole tensor of a model, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class ModelState:
    """The state of a module with parts on several ranks: it gathers a ``state_dict``, and loads one."""

    def __init__(self, part: LocalPart, placed: ParallelState, ranks: Ranks) -> None:
        self._part = part
        self._placed = placed
        self._ranks = ranks
        #: What came before the parameters had a place, in order.
        self._waiting: list[Callable[[], Any]] = []
        #: Whole states among it.
        self._kept: list[dict[str, Any]] = []

    def gathered(self, local: dict[str, Any], *, to_first: bool) -> Any:
        """Gather the full state from this rank's, on all ranks of a model parallel group, or only on the first."""
        ranks = self._ranks
        state = whole_state(self._part.module, local, TensorGroup.of(ranks), to_first=to_first)
        if to_first and ranks.rank_in(Group.TP) != 0:
            return {}
        if self._part.stage_of is None:
            return state
        mine = {name: _on_cpu(value) for name, value in state.items()}
        exchange = ranks.control.gather if to_first else ranks.control.allgather
        with ranks.control.doing("DistributedModel.state_dict"):
            parts = exchange(mine, ranks.members(Group.PP))
        if parts is None:
            return {}
        merged: dict[str, Any] = {}
        for part in parts:
            merged.update(part)
        order = list(self._part.module.state_dict(keep_vars=True))
        return {name: state.get(name, merged[name]) for name in order if name in merged}

    def to_save(self) -> dict[str, Any]:
        """See :meth:`.DistributedModel.state_to_save`."""
        keeps = self._ranks.rank_in(Group.RDP) == 0
        local = self.local(keep=keeps)
        return self.gathered(local, to_first=True) if keeps else {}

    def described(self, only: Container[str] | None = None) -> list[TensorShape] | None:
        """Return the tensors of :meth:`stream`, in its order, on the job's first rank; all ranks call it."""
        pieces = [TensorShape(name, shape, tensor.dtype) for name, shape, tensor in self._pieces(only)]
        ranks = self._ranks
        if ranks.rank_in(Group.TP) or ranks.rank_in(Group.RDP):
            return None
        stages = ranks.control.gather(pieces, ranks.members(Group.PP))
        if stages is None:
            return None
        described: list[TensorShape] = []
        for of_stage in stages:
            described += of_stage
        return described

    def stream(self, only: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter by its first name and every saved buffer, whole, on the CPU, one after the other.

        All ranks iterate to the end; only the job's first rank gets them. It holds one tensor at a time, and with sharded
        parameters those of one flat unit.

        Args:
            only: names of the tensors to send; the others are not sent.
        """
        ranks = self._ranks
        whole = self._whole(only)
        if ranks.rank_in(Group.TP) or ranks.rank_in(Group.RDP):
            for _ in whole:
                pass
            return
        first, *others = ranks.members(Group.PP)
        if ranks.rank != first:
            for piece in whole:
                ranks.control.send(piece, first, RUNTIME_CHANNEL)
            ranks.control.send(None, first, RUNTIME_CHANNEL)
            return
        yield from whole
        for rank in others:
            while (piece := ranks.control.receive(rank, RUNTIME_CHANNEL)) is not None:
                yield piece

    def _whole(self, only: Container[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of this rank's stage.

        Its replicas help to gather sharded ones, and get nothing.
        """
        shards, group = self._placed.shards, TensorGroup.of(self._ranks)
        keeps = self._ranks.rank_in(Group.RDP) == 0
        pieces = self._pieces(only)
        ours = {id(tensor) for _, _, tensor in pieces}
        sharded = iter(()) if shards is None else shards.whole_parameters(keep=keeps, only=ours)
        if not keeps:
            for _ in sharded:
                pass
            return
        slices = slices_by_name(self._part.module)
        for name, _, tensor in pieces:
            in_shards = shards is not None and tensor in shards.parameters
            value = next(sharded)[1] if in_shards else tensor.detach()
            where = slices.get(name)
            if where is not None and group.size > 1:
                value = gather_whole(value, where, group)
            yield name, value.cpu()
        for _ in sharded:
            raise AssertionError("a sharded parameter that is not in the state")

    def _pieces(self, only: Container[str] | None) -> list[tuple[str, tuple[int, ...], torch.Tensor]]:
        """Return name, whole shape, and this rank's part of its stage's tensors.

        Sharded tensors come first, unit by unit.
        """
        shards = self._placed.shards
        reading = contextlib.nullcontext() if shards is None else shards.reading_state()
        with reading:
            state = self._part.module.state_dict(keep_vars=True)
        pieces = [*self._sharded_pieces(state), *self._other_pieces(state)]
        if only is None:
            return pieces
        return [piece for piece in pieces if piece[0] in only]

    def _sharded_pieces(self, state: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
        shards = self._placed.shards
        units = [] if shards is None else shards.units
        for unit in units:
            for parameter in unit.parameters:
                record = self._part.registry.record_of(parameter)
                # A script's state_dict may leave parameters out, for example frozen ones.
                if record.name in state:
                    yield record.name, record.shape, parameter

    def _other_pieces(self, state: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
        shards = self._placed.shards
        records = {}
        for record in self._part.registry:
            records.update(dict.fromkeys(record.names, record))
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or not self._part.has_tensor(name):
                continue
            record_of_name = records.get(name)
            if record_of_name is None:
                yield name, tuple(value.shape), value
                continue
            parameter = record_of_name.parameter
            is_sharded = shards is not None and parameter in shards.parameters
            if record_of_name.name == name and not is_sharded:
                yield name, record_of_name.shape, parameter

    def local(self, *args: Any, keep: bool = True, **kwargs: Any) -> dict[str, Any]:
        """Return the state of this rank's stage; sharded parameters are gathered, and kept if ``keep``."""
        part, shards = self._part, self._placed.shards
        if len(self._waiting) > len(self._kept):
            raise SMPUserError(
                "the model's state was read between a checkpoint's load and the first step of a pipeline, when it still has its "
                "former values: read it behind that step, or from the checkpoint's files (smp-estimator checkpoint convert)",
                code="SMP303",
            )
        prefix = kwargs.get("prefix", "")
        with shards.reading_state() if shards is not None else contextlib.nullcontext():
            state: dict[str, Any] = part.module.state_dict(*args, **kwargs)
        if not kwargs.get("keep_vars") and any(_is_without_values(value) for value in state.values()):
            self._compute(state, prefix)
        if shards is not None:
            shards.complete(state, lambda p: part.registry.record_of(p).names, prefix, keep)
        if part.stage_of is None:
            return state
        return {name: value for name, value in state.items() if part.has_tensor(name.removeprefix(prefix))}

    def _compute(self, state: dict[str, Any], prefix: str) -> None:
        """Put values into a state of a model that is created late, before its parameters are placed.

        They are the values that the parameters will get.
        """
        module = self._part.module
        named = {prefix + name: value for name, value in module.state_dict(keep_vars=True).items()}
        tensors = [value for value in named.values() if isinstance(value, torch.Tensor)]
        found = values_of(self._ranks.keep(Deferrals, Deferrals), tensors)
        slices = slices_by_name(module)
        for name, value in state.items():
            if not _is_without_values(value):
                continue
            computed = found.get(id(named.get(name)))
            for kept in self._kept:
                loaded = kept.get(name.removeprefix(prefix))
                if isinstance(loaded, torch.Tensor):
                    where = slices.get(name.removeprefix(prefix))
                    fits = where is None or tuple(loaded.shape) == tuple(value.shape)
                    computed = (loaded if fits or where is None else where.cut(loaded)).to(
                        "cpu", value.dtype, copy=True
                    )
            if computed is None:
                raise SMPUserError(
                    f"{name} has no values before the first step of a pipeline: it is on the meta device, and was not recorded by "
                    "smp.delay_param_initialization() or smp.model_creation(); create the whole model in one of them, or read "
                    "the state behind the first step",
                    code="SMP303",
                )
            state[name] = computed

    def load(
        self,
        state_dict: Mapping[str, Any],
        strict: bool,
        assign: bool,
        *,
        same_partition: bool,
        partitioned: bool,
        known: bool,
    ) -> Any:
        """See :meth:`.DistributedModel.load_state_dict`.

        Args:
            same_partition: whether a part is of this very partition, so that no stage needs another's.
            partitioned: whether the parameters have a place.
            known: whether gradient reduction or the optimizer know the parameters.
        """
        if assign and (known or not partitioned):
            raise SMPUserError(
                "load_state_dict(assign=True) replaces parameters, which gradient reduction and the optimizer already know; "
                "leave assign at False",
                code="SMP303",
            )
        module, optimizer_shards = self._part.module, self._placed.optimizer_shards or {}
        partial = PARTIAL_KEY in state_dict
        state = {name: value for name, value in state_dict.items() if name != PARTIAL_KEY}
        own = module.state_dict(keep_vars=True)
        if state and not own.keys() & state.keys() and all(name.startswith("module.") for name in state):
            state = {name.removeprefix("module."): value for name, value in state.items()}
        # Behind what waits: loaded now, it would be overwritten by a checkpoint that came before it.
        waits = bool(self._waiting) or partial or any(p.is_meta for p in module.parameters())
        if not partitioned and waits:
            kept = dict(state_dict)
            _refuse_without_values(kept)
            if not partial:
                self._kept.append(state)
            then = {"same_partition": same_partition, "partitioned": True, "known": True}
            self.when_placed(lambda: self.load(kept, strict, assign, **then))
            return IncompatibleKeys([], [])
        if partial and not same_partition:
            state = self._with_parts_of_others(state)
        result = self._load(state, strict, assign, own)
        for record in self._part.registry:  # masters take a float32 state unrounded
            shard = optimizer_shards.get(record.parameter)
            value = next((state[name] for name in record.names if name in state), None)
            if shard is not None and isinstance(value, torch.Tensor):
                shard.take(part_of(record, value))
        return result

    def _with_parts_of_others(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a stage's partial state, completed by the other stages' partial states.

        The partial states may be from another partition. Each stage sends the tensors that others lack.
        """
        part, members = self._part, self._ranks.members(Group.PP)
        if part.stage_of is None:
            return state
        control = self._ranks.control
        names = list(part.module.state_dict(keep_vars=True))
        lacking = [name for name in names if part.has_tensor(name) and name not in state]
        wanted = set().union(*control.allgather(lacking, members))
        if not wanted:
            return state
        given = {name: _on_cpu(value) for name, value in state.items() if name in wanted}
        found: dict[str, Any] = {}
        for of_stage in control.allgather(given, members):
            found.update(of_stage)
        completed = {name: found[name] for name in lacking if name in found}
        return {**completed, **state}

    def _load(self, state: dict[str, Any], strict: bool, assign: bool, own: Mapping[str, Any]) -> Any:
        part = self._part
        if part.stage_of is None:
            return part.module.load_state_dict(state, strict=strict, assign=assign)
        here = {name: value for name, value in state.items() if part.has_tensor(name) or name not in own}
        missing, unexpected = part.module.load_state_dict(here, strict=False)
        missing = [name for name in missing if part.has_tensor(name)]
        if strict and (missing or unexpected):
            raise SMPOperationError(
                f"the state does not fit stage {part.stage} of the {type(part.module).__name__}: missing {missing}, unexpected "
                f"{unexpected}; load the state of this model, or pass strict=False",
                code="SMP303",
            )
        return IncompatibleKeys(missing, unexpected)

    def when_placed(self, load: Callable[[], Any]) -> None:
        """Call ``load`` when the parameters have a place."""
        self._waiting.append(load)

    def load_what_waited(self) -> None:
        """Load the states that came before the parameters were placed."""
        waiting, self._waiting, self._kept = self._waiting, [], []
        for load in waiting:
            load()


def _is_without_values(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, RemoteStub):
        return False
    return value.is_meta


def _refuse_without_values(state: Mapping[str, Any]) -> None:
    empty = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if empty:
        raise SMPUserError(
            f"the state to load has no values for {len(empty)} of its {len(state)} entries, the first {empty[0]}: they are on the "
            "meta device; take the state from model.state_dict() of the wrapped model, or from a file",
            code="SMP303",
        )


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
