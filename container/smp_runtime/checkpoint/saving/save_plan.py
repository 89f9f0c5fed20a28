"""What this rank writes into a partial checkpoint: its files, and the pieces that are in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_runtime.checkpoint.files.manifest import EXTRA, MASTER, MODULE, Piece, TensorRecord
from smp_runtime.checkpoint.live_state import (
    LiveNames,
    Updated,
    live_buffers,
    live_extras,
    live_masters,
    live_weights,
    updated_parameters,
)
from smp_runtime.checkpoint.object_files import partial_suffix
from smp_runtime.checkpoint.saving.flat_buffers import Apart, FlatGroups, Keep, flat_groups, piece_of
from smp_runtime.optim.whole_state import is_elementwise
from smp_runtime.tensors.torch_private import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.optim.distributed_optimizer import DistributedOptimizer

PARTIAL_KEY = "_smp_is_partial"
#: In files, and in the names that ``keep`` is called with: parts of sharded parameters.
SHARDS = "shards"


@dataclass
class SavePlan:
    """This rank's part of a checkpoint.

    Attributes:
        first: what ranks do together before any of them writes; all those that have it call it.
        files: by name, what makes the file's content; nothing is copied before, and settings are those of that time.
        pieces: by file, by state key, by global name.
        parameters: those of this stage, from one rank of each stage.
        buffers: the same.
        elsewhere: those of ``files`` that ranks of another host write as well.
    """

    first: Callable[[], None] | None = None
    files: dict[str, Callable[[Keep], Any]] = field(default_factory=dict)
    pieces: dict[str, dict[str, dict[str, Piece]]] = field(default_factory=dict)
    parameters: dict[str, TensorRecord] = field(default_factory=dict)
    buffers: dict[str, TensorRecord] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)

    def note(self, file: str, key: str, name: str, piece: Piece) -> None:
        """Record that a file has a piece."""
        self.pieces.setdefault(file, {}).setdefault(key, {})[name] = piece


class WriteShare:
    """Which of the ranks that have the same elements writes them.

    Args:
        hosts: by global rank, the number of its host, if hosts have folders of their own; then one rank on each host
            writes, so that every host can go on from its own folder. None if all share one.
    """

    def __init__(self, session: Session, hosts: Sequence[int] | None) -> None:
        self._session = session
        self._hosts = hosts
        self.rdp = session.ranks.rank_in(Group.RDP)
        #: Whether this rank writes what all tensor parallel ranks have alike.
        self.leads_tensors = session.ranks.rank_in(Group.TP) == 0

    @property
    def has_copies(self) -> bool:
        """Return whether several ranks write the same elements."""
        return self._hosts is not None

    def writes(self, parts: int) -> bool:
        """Return whether this rank writes its elements.

        Args:
            parts: number of neighbors along the reduced data parallel axis that have different elements.
        """
        if self.rdp < parts:
            return True
        if self._hosts is None:
            return False
        session = self._session
        me = session.ranks.topology.coordinates(session.ranks.rank)
        for rank in range(session.ranks.rank):
            at = session.ranks.topology.coordinates(rank)
            same = (at.pp, at.tp, at.rdp % parts) == (me.pp, me.tp, me.rdp % parts)
            if same and self._hosts[rank] == self._hosts[session.ranks.rank]:
                return False
        return True

    def is_elsewhere(self, parts: int) -> bool:
        """Return whether a rank of another host also writes the same; ``parts`` as for :meth:`writes`."""
        if self._hosts is None:
            return False
        session = self._session
        me = session.ranks.topology.coordinates(session.ranks.rank)
        for rank, host in enumerate(self._hosts):
            at = session.ranks.topology.coordinates(rank)
            if host != self._hosts[session.ranks.rank] and (at.pp, at.tp, at.rdp % parts) == (
                me.pp,
                me.tp,
                me.rdp % parts,
            ):
                return True
        return False

    def suffix(self, parts: int) -> str:
        """Return the suffix that distinguishes this rank's file names."""
        session = self._session
        if parts == 1:
            return partial_suffix(session)
        if session.ranks.size(Group.MP) == 1 and session.ranks.cfg.sharded_data_parallel_degree > 1:
            return str(self.rdp % parts)
        return self.coordinates(parts)

    def coordinates(self, parts: int) -> str:
        """Return this rank's place on the three axes."""
        session = self._session
        return f"{session.ranks.rank_in(Group.PP)}_{session.ranks.rank_in(Group.TP)}_{self.rdp % parts}"


def state_parts(session: Session, model: DistributedModel | None) -> int:
    """Return the number of neighbors along the reduced data parallel axis that divide the optimizer state."""
    state = model.sharded_state if model is not None else None
    return 1 if state is None else session.ranks.size(state.sharing)


def contents_of(
    session: Session,
    model: DistributedModel,
    optimizer: DistributedOptimizer | None,
    share: WriteShare,
    apart: Apart | None = None,
    *,
    as_held: bool = False,
) -> SavePlan:
    """Return the plan of what this rank writes.

    With sharded data parallelism, ranks first exchange parts, unit by unit.

    Args:
        apart: given when another thread will write.
        as_held: write parts of sharded parameters as this rank has them, without an exchange. This library can
            load them, other tools cannot.
    """
    made = SavePlan()
    entries = updated_parameters(model, optimizer) if optimizer is not None else []
    parts, names = state_parts(session, model), LiveNames(model)
    flat = FlatGroups()
    if model.shards is not None and entries and not as_held and (share.has_copies or share.rdp < parts):
        flat, made.first = flat_groups(session, model, entries, share.leads_tensors, apart)
    if share.rdp == 0 and share.leads_tensors:
        _describe(made, model, names, session.ranks.rank_in(Group.PP))
    _module_file(made, model, names, share)
    if share.is_elsewhere(1):
        made.elsewhere |= set(made.files)
    if share.writes(parts):
        whole = set(made.files)
        _shard_file(made, model, names, share, parts, flat)
        _master_file(made, session, model, optimizer, share, parts, flat)
        if optimizer is not None:
            _optimizer_file(made, model, names, optimizer, entries, share, parts, flat)
        if share.is_elsewhere(parts):
            made.elsewhere |= made.files.keys() - whole
    return made


def _describe(made: SavePlan, model: DistributedModel, names: LiveNames, stage: int) -> None:
    for record in names.records:
        made.parameters[record.name] = TensorRecord(
            tuple(record.shape),
            _dtype(record.parameter),
            record.aliases,
            record.placement.stage,
            record.placement.tensor_axis,
            record.parameter.requires_grad,
        )
    for holding in live_buffers(model, names):
        made.buffers[holding.name] = TensorRecord(
            holding.region.shape, _dtype(holding.tensor), stage=stage, trained=False
        )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _module_file(made: SavePlan, model: DistributedModel, live: LiveNames, share: WriteShare) -> None:
    """Add ``model_*.pt``: everything that is the same on replicas, under all of its names, in the order of the model."""
    if not share.writes(1):
        return
    file = f"model_{share.suffix(1)}.pt"
    sharded = model.shards.parameters if model.shards is not None else set()
    names = {record.name: record.names for record in live.records}
    whole = [h for h in live_weights(model, live) if h.record is not None and h.record.parameter not in sharded]
    held = [h for h in whole if h.is_split or share.leads_tensors]
    others = list(live_buffers(model, live)) if share.leads_tensors else []
    own = list(live_extras(model)) if share.leads_tensors else []
    for holding in (*held, *others):
        made.note(file, MODULE, holding.name, piece_of(holding.region))
    for name, _ in own:
        made.note(file, EXTRA, name, Piece(whole_object=True))
    empty = {record.names: record.parameter for record in live.records if record.parameter in sharded}

    def build(keep: Keep) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for holding in held:
            value = keep(f"{MODULE}/{holding.name}", holding.tensor)
            found |= dict.fromkeys(names[holding.name], value)
        for all_names, parameter in empty.items():
            # Their shape, without values, which are in the files of the ranks that share them out.
            nothing = torch.full((), float("nan"), dtype=parameter.dtype, device="cpu").expand(parameter.shape)
            found |= dict.fromkeys(all_names, nothing)
        for holding in others:
            found[holding.name] = keep(f"{MODULE}/{holding.name}", holding.tensor)
        for name, module in own:
            found[name] = _kept(keep, f"{EXTRA}/{name}", module.get_extra_state())
        order = [name for name in live.saved if name in found]
        return {"module": {name: found[name] for name in order}, PARTIAL_KEY: True}

    made.files[file] = build


def _shard_file(
    made: SavePlan, model: DistributedModel, names: LiveNames, share: WriteShare, parts: int, flat: FlatGroups
) -> None:
    """Add ``model_<pp>_<tp>_<shard>.pt``: parts of sharded parameters that no optimizer has."""
    if model.shards is None:
        return
    held = [
        h
        for h in live_weights(model, names)
        if h.record is not None
        and h.record.parameter in model.shards.parameters
        and (h.is_split or share.leads_tensors)
        and h.name not in flat.names
    ]
    if not held:
        return
    file = f"model_{share.coordinates(parts)}.pt"
    for holding in held:
        made.note(file, MODULE, holding.name, piece_of(holding.region))

    def build(keep: Keep) -> dict[str, Any]:
        return {SHARDS: {h.name: keep(f"{SHARDS}/{h.name}", h.tensor) for h in held}, PARTIAL_KEY: True}

    made.files[file] = build


def _master_file(
    made: SavePlan,
    session: Session,
    model: DistributedModel,
    optimizer: DistributedOptimizer | None,
    share: WriteShare,
    parts: int,
    flat: FlatGroups,
) -> None:
    """Add ``fp16_states_*.pt``: float32 weights and the loss scale, in half precision training."""
    if not model.precision.is_half:
        return
    sharded = model.shards.parameters if model.shards is not None else None
    held = [
        h
        for h in live_masters(model)
        if (h.is_split or share.leads_tensors)
        and h.name not in flat.names
        # Small parameters stay whole on every rank of a sharding group.
        and (sharded is None or (h.record is not None and h.record.parameter in sharded) or share.rdp % parts == 0)
    ]
    scaler = optimizer.loss_scaler if optimizer is not None and session.ranks.cfg.fp16 else None
    if not held and scaler is None:
        return
    file = f"fp16_states_{share.suffix(parts)}.pt"
    for holding in held:
        made.note(file, MASTER, holding.name, piece_of(holding.region))

    def build(keep: Keep) -> dict[str, Any]:
        masters = {h.name: keep(f"{MASTER}/{h.name}", h.tensor if h.counted is None else h.counted) for h in held}
        found: dict[str, Any] = {"masters": masters}
        return found if scaler is None else {**found, "loss_scaler": scaler.state_dict()}

    made.files[file] = build


def _optimizer_file(
    made: SavePlan,
    model: DistributedModel,
    live: LiveNames,
    optimizer: DistributedOptimizer,
    entries: Sequence[Updated],
    share: WriteShare,
    parts: int,
    flat: FlatGroups,
) -> None:
    """Add ``optimizer_*.pt``: the state of this rank's updated parameters by global name, and the groups' settings."""
    file = f"optimizer_{share.suffix(parts)}.pt"
    sharded = model.shards.parameters if model.shards is not None else None
    local, shared_out = {record.parameter for record in live.records}, model.optimizer_shards or {}
    state: dict[str, dict[str, Any]] = {}
    for entry in entries:
        split = entry.record.placement.tensor_axis is not None
        # Small parameters are updated whole on every rank of a sharding group, and of frozen ones each has its own state.
        alike = (sharded is not None and entry.parameter not in sharded) or entry.parameter not in shared_out
        if entry.updated is None or not (split or share.leads_tensors) or (alike and share.rdp % parts):
            continue
        if entry.parameter not in local:
            continue
        for key, value in optimizer.state.get(entry.updated, {}).items():
            state.setdefault(entry.name, {})[key] = value
            if is_elementwise(value, entry.updated):
                made.note(file, key, entry.name, piece_of(entry.region))
            else:
                tensor = piece_of(entry.region).tensor
                made.note(file, key, entry.name, Piece(tensor, whole_object=True))
    for name, piece in flat.pieces.items():
        made.note(file, MASTER, name, piece)
    names: list[list[str]] = [[] for _ in optimizer.param_groups]
    for entry in entries:
        names[entry.group].append(entry.name)

    def build(keep: Keep) -> dict[str, Any]:
        settings = [
            {**{key: value for key, value in group.items() if key not in ("params", "param_names")}, "params": members}
            for group, members in zip(optimizer.param_groups, names, strict=True)
        ]
        kept = {
            name: {key: _kept(keep, f"{key}/{name}", value) for key, value in values.items()}
            for name, values in state.items()
        }
        found: dict[str, Any] = {"state": kept, "param_groups": _kept(keep, "settings", settings), PARTIAL_KEY: True}
        if flat.buffers is not None:
            found |= {
                "partition_count": parts,
                # Nothing else uses these buffers, so they need no copy. They may be filled only later.
                "fp32_flat_groups": flat.buffers,
                "param_shapes": flat.shapes,
            }
        return found

    made.files[file] = build


def _kept(keep: Keep, name: str, value: Any) -> Any:
    """Return a tensor or an object as it is now: tensors by ``keep``, everything else copied."""
    if isinstance(value, torch.Tensor):
        return keep(name, value)
    leaves, structure = tree_flatten(value)
    kept = [
        keep(f"{name}/{number}", leaf) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
        for number, leaf in enumerate(leaves)
    ]
    return tree_unflatten(kept, structure)
