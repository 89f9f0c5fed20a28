"""The weights of a full checkpoint: one state of the whole model, written for plain PyTorch or Transformers, and read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.checkpoint.files.manifest import EXTRA, MODULE, FoundCheckpoint, Manifest, Piece
from smp_runtime.checkpoint.files.reader import CheckpointReader
from smp_runtime.checkpoint.files.save_id import marked_state
from smp_runtime.checkpoint.files.state_names import each_once, names_of_each, record_of, renamed
from smp_runtime.checkpoint.files.transformers_format import (
    PICKLED,
    SAFETENSORS,
    config_of,
    is_transformers_name,
    read_weights,
    weights_of,
    write_transformers,
)
from smp_runtime.checkpoint.files.whole_file import write_tensors
from smp_runtime.checkpoint.load_partial import Loading

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel

logger = logging.getLogger("smp")

Translate = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def write_weights(
    session: Session,
    model: DistributedModel,
    state: Mapping[str, Any],
    file: Path,
    *,
    translates: bool,
    save_id: str | None = None,
) -> None:
    """Write a whole state, on one rank.

    ``pytorch_model.bin`` and names that end in ``.safetensors`` are written so that Transformers loads the folder: each
    tensor once, with the model's configuration beside it. Anything else is a file of ``torch.save``.

    Args:
        state: from ``model.state_dict()``.
        file: its folder exists.
        translates: to the names that the models had before they were distributed.

    Raises:
        SMPUserError: the format does not have a type.
    """

    def translated(whole: Mapping[str, Any]) -> Mapping[str, Any]:
        return session.module_manager.translated(whole, model.module) if translates else whole

    # Gathered from several ranks, the names of a tied weight do not share memory any more.
    first_of = {name: record.name for record in model.registry for name in record.names}
    if not is_transformers_name(file.name):
        whole = translated({name: state.get(first_of.get(name, name), value) for name, value in state.items()})
        on_cpu = {id(v): v.detach().cpu() for v in whole.values() if isinstance(v, torch.Tensor)}  # tied ones stay one
        made = {name: on_cpu.get(id(value), value) for name, value in whole.items()}
        write_tensors(marked_state(made, save_id), file)
        return
    once = translated({name: value for name, value in state.items() if first_of.get(name, name) == name})
    tensors = each_once({name: value for name, value in once.items() if isinstance(value, torch.Tensor)})
    write_transformers(file, tensors, config_of(model.module) if translates else None, save_id=save_id)
    if file.name == PICKLED and weights_of(file.parent) != file and (file.parent / SAFETENSORS).exists():
        logger.warning(
            "%s was saved, but Transformers takes %s from the same folder first; save into a folder of its own",
            file.name,
            SAFETENSORS,
        )


def plan_weights(
    session: Session, model: DistributedModel, path: Path, translate: Translate | None = None, *, strict: bool = True
) -> Loading:
    """Full weights on their way into a model of any topology: checked; ``load()`` of the result loads them.

    Files are mapped and read tensor by tensor; each rank copies its own part.

    Args:
        path: a file of ``torch.save`` or of safetensors, an index of shards, or a folder of Transformers.
        translate: applied to the state first.
        strict: whether the names must agree exactly.

    Raises:
        CheckpointError: a file is missing or damaged, or it is of another model.
    """
    state: Mapping[str, Any] = read_weights(path)
    if translate is not None:
        state = translate(state)
    reader = FullReader(path, renamed(state, model.module), model)
    checkpoint = FoundCheckpoint(path.name, path, reader.manifest)
    return Loading(session, checkpoint, model, None, strict=strict, states=False, reader=reader)


class FullReader(CheckpointReader):
    """A whole state as if it were a partial checkpoint of one rank.

    Args:
        path: where it is from, for messages.
        state: tensors by name, and objects of modules with a state of their own making.
        model: that will be loaded; of names that mean one tensor there, the first counts.
    """

    def __init__(self, path: Path, state: Mapping[str, Any], model: DistributedModel) -> None:
        first_of = {name: record.name for record in model.registry for name in record.names}
        objects = [name for name in state if name.rpartition(".")[2] == "_extra_state"]
        tensors: dict[str, torch.Tensor] = {}
        for name, value in state.items():
            first = first_of.get(name, name)
            if isinstance(value, torch.Tensor) and name not in objects and not (first != name and first in state):
                tensors[name] = value
        manifest = Manifest(
            path.name,
            parameters={first: record_of(state[first], tuple(others)) for first, *others in names_of_each(tensors)},
        )
        manifest.pieces[path.name] = {MODULE: dict.fromkeys(manifest.parameters, Piece())}
        if objects:
            manifest.pieces[path.name][EXTRA] = dict.fromkeys(objects, Piece(whole_object=True))
        super().__init__(path, manifest)
        self._files[path.name] = {"module": dict(state)}
