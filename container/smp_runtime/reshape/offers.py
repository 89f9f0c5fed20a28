"""The catalogue of the parts of a model and its optimizer on all ranks of a job; the tensors stay on their ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_runtime.checkpoint.files.manifest import EXTRA, MASTER, MODULE, Manifest, Piece, TensorRecord
from smp_runtime.checkpoint.files.name_translation import translation_names
from smp_runtime.checkpoint.live_state import (
    live_buffers,
    live_extras,
    live_masters,
    live_weights,
    local_records,
    saved_records,
    updated_parameters,
)
from smp_runtime.checkpoint.saving.save_report import optimizer_record
from smp_runtime.errors import SMPUserError
from smp_runtime.optim.whole_state import is_elementwise

if TYPE_CHECKING:
    from smp_runtime.checkpoint.files.tensor_regions import TensorRegion
    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.optim.distributed_optimizer import DistributedOptimizer

#: Of buffers that are in no ``state_dict``.
UNSAVED = "buffer"

Key = tuple[str, str]  # a state key, and a global name


@dataclass
class Offer:
    """What one rank has.

    Attributes:
        tensors: flat, by state key and name, each with its place in the whole.
        objects: what belongs to the whole of a parameter, or of a tensor parallel part of it.
        parameters: of this stage.
        buffers: the same.
    """

    tensors: dict[Key, tuple[Piece, torch.Tensor]] = field(default_factory=dict)
    objects: dict[Key, tuple[Piece, Any]] = field(default_factory=dict)
    parameters: dict[str, TensorRecord] = field(default_factory=dict)
    buffers: dict[str, TensorRecord] = field(default_factory=dict)

    @classmethod
    def of(cls, session: Session, model: DistributedModel, optimizer: DistributedOptimizer | None) -> Offer:
        """Return the offer of this rank's present tensors and objects.

        Raises:
            SMPUserError: a parameter is not in the model's ``state_dict``, or the optimizer has a parameter that the
                model does not have.
        """
        made = cls()
        saved = {id(record.parameter) for record in saved_records(model)}
        if lost := [record.name for record in model.registry if id(record.parameter) not in saved]:
            raise SMPUserError(
                f"the model's state_dict leaves out {len(lost)} of its parameters ({', '.join(lost[:3])}), so that they cannot be "
                "moved to other ranks by name; let it have them all",
                code="SMP314",
            )
        stage = session.ranks.rank_in(Group.PP)
        for record in local_records(model):
            at = record.placement
            made.parameters[record.name] = TensorRecord(
                tuple(record.shape),
                _dtype(record.parameter),
                record.aliases,
                at.stage,
                at.tensor_axis,
                record.parameter.requires_grad,
            )
        for key, holdings in (
            (MODULE, live_weights(model)),
            (MASTER, live_masters(model)),
            (MODULE, live_buffers(model)),
        ):
            for holding in holdings:
                made._add(key, holding.name, holding.region, holding.tensor.detach())
                if holding.record is None:
                    made.buffers[holding.name] = TensorRecord(
                        holding.region.shape, _dtype(holding.tensor), stage=stage, trained=False
                    )
        for name, buffer in model.local_named_buffers(remove_duplicate=False):
            if name not in made.buffers and not buffer.is_meta:
                made.tensors[UNSAVED, name] = (Piece(), buffer.detach().reshape(-1))
                made.buffers[name] = TensorRecord(tuple(buffer.shape), _dtype(buffer), stage=stage, trained=False)
        for name, module in live_extras(model):
            made.objects[EXTRA, name] = (Piece(whole_object=True), module.get_extra_state())
        if optimizer is not None:
            made._add_states(model, optimizer)
        return made

    def _add_states(self, model: DistributedModel, optimizer: DistributedOptimizer) -> None:
        local = {id(parameter) for parameter in model.local_parameters()}
        for entry in updated_parameters(model, optimizer):
            if id(entry.parameter) not in local:
                continue
            if entry.updated is None:
                continue
            for key, value in optimizer.state.get(entry.updated, {}).items():
                if is_elementwise(value, entry.updated):
                    self._add(key, entry.name, entry.region, value)
                else:
                    cuts = _piece(entry.region).tensor
                    self.objects[key, entry.name] = (Piece(cuts, whole_object=True), value)

    def _add(self, key: str, name: str, region: TensorRegion, tensor: torch.Tensor) -> None:
        self.tensors[key, name] = (_piece(region), tensor.reshape(-1))

    def drop(self, names: set[str]) -> None:
        """Free tensors with these names, because no rank needs them any more."""
        for key in [key for key in self.tensors if key[1] in names]:
            del self.tensors[key]


def _piece(region: TensorRegion) -> Piece:
    tensor = None if region.axis is None else region.cuts
    flat = None if region.is_slice else (region.first, region.last)
    return Piece(tensor, flat)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@dataclass
class Catalogue:
    """What all ranks have, the same on all of them.

    Attributes:
        manifest: as that of a checkpoint, with ranks in the place of files.
        dtypes: of the tensors.
        objects: by rank, state key and name; of those that several have, the first rank's.
    """

    manifest: Manifest
    dtypes: dict[Key, torch.dtype]
    objects: dict[tuple[str, str, str], Any]


def exchange_offers(
    session: Session, model: DistributedModel, optimizer: DistributedOptimizer | None, mine: Offer
) -> Catalogue:
    """Exchange the offers of all ranks and return their catalogue; every rank calls it."""
    ranks = session.ranks
    everyone = list(range(ranks.control.size))
    told = (
        {key: (piece.to_list(), _dtype(tensor)) for key, (piece, tensor) in mine.tensors.items()},
        {key: piece.to_list() for key, (piece, _) in mine.objects.items()},
        mine.parameters,
        mine.buffers,
    )
    manifest = Manifest("", topology={}, translations=translation_names(session.module_manager.translate_functions))
    if optimizer is not None:
        manifest.optimizer = optimizer_record(optimizer, updated_parameters(model, optimizer))
    dtypes: dict[Key, torch.dtype] = {}
    first: dict[tuple[str, str, tuple[int, ...] | None], int] = {}
    for rank, (tensors, objects, parameters, found) in enumerate(ranks.control.allgather(told, everyone)):
        pieces: dict[str, dict[str, Piece]] = {}
        for (key, name), (piece, dtype) in tensors.items():
            pieces.setdefault(key, {})[name] = Piece.from_list(piece)
            dtypes.setdefault((key, name), getattr(torch, dtype))
        for (key, name), values in objects.items():
            piece = Piece.from_list(values)
            if first.setdefault((key, name, piece.tensor), rank) == rank:
                pieces.setdefault(key, {})[name] = piece
        manifest.pieces[str(rank)] = pieces
        manifest.parameters |= parameters
        manifest.buffers |= found
    # In the model's order on all ranks, because each stage reports only its own parameters.
    order = {record.name: record for record in model.registry}
    manifest.parameters = {name: manifest.parameters[name] for name in order if name in manifest.parameters}
    own = [key for key, rank in first.items() if rank == ranks.rank]
    given = [(key, name, mine.objects[key, name][1]) for key, name, _ in own]
    gathered = ranks.control.allgather(given, everyone)
    objects = {(str(rank), key, name): value for rank, values in enumerate(gathered) for key, name, value in values}
    return Catalogue(manifest, dtypes, objects)
