"""A full checkpoint read by names, tensor by tensor: weights, and optimizer state if numbers do not suffice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.checkpoint.files.manifest import (
    EXTRA,
    MASTER,
    MODULE,
    FoundCheckpoint,
    Manifest,
    OptimizerRecord,
    Piece,
)
from smp_runtime.checkpoint.files.name_translation import names_of_each, record_of
from smp_runtime.checkpoint.files.reader import CheckpointReader
from smp_runtime.checkpoint.load_partial import PartialLoad
from smp_runtime.errors import CheckpointError
from smp_runtime.optim.whole_state import HALF_KEY, does_clash
from smp_runtime.tensors.nested import copy_tensors

if TYPE_CHECKING:
    from smp_runtime.checkpoint.full.named_optimizer import NamedState
    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.optim.distributed_optimizer import DistributedOptimizer


@dataclass(frozen=True)
class WithStates:
    """An optimizer's state that is read by names, together with the weights."""

    optimizer: DistributedOptimizer
    saved: NamedState
    title: str  # of the file


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
            # Of a tied weight, the first name is enough.
            is_repeated = first != name and first in state
            is_tensor = isinstance(value, torch.Tensor) and name not in objects
            if is_tensor and not is_repeated:
                tensors[name] = value
        parameters = {}
        for first, *others in names_of_each(tensors):
            parameters[first] = record_of(state[first], tuple(others))
        manifest = Manifest(path.name, parameters=parameters)
        manifest.pieces[path.name] = {MODULE: dict.fromkeys(manifest.parameters, Piece())}
        if objects:
            manifest.pieces[path.name][EXTRA] = dict.fromkeys(objects, Piece(whole_object=True))
        super().__init__(path, manifest)
        self._files[path.name] = {"module": dict(state)}

    def add_states(self, states: WithStates, moved: Mapping[str, str]) -> None:
        """Read the optimizer's state, and the float32 weights beside it, too.

        Args:
            moved: names of the weights here, by those in the file.

        Raises:
            CheckpointError: it is of other parameters than the weights.
        """
        saved, manifest, title = states.saved, self.manifest, states.title
        first_of = {alias: name for name in manifest.parameters for alias in manifest.names_of(name)}
        half = saved.state.get(HALF_KEY) or {}
        flat = [name for group in saved.names for name in group]
        known = {
            name: first_of.get(moved.get(name, name), "") for name in dict.fromkeys([*flat, *half.get("masters", ())])
        }
        if lost := [name for name, first in known.items() if not first]:
            raise CheckpointError(
                f"{title} has the state of {len(lost)} parameters that {self.folder} does not have ({', '.join(lost[:3])}); copy "
                "both files of one save, or pass load_optimizer=False"
            )
        sections: dict[str, Any] = {"state": {}, "masters": {}}
        pieces: dict[str, dict[str, Piece]] = {}
        for name, values in saved.by_name().items():
            first, shape = known[name], manifest.parameters[known[name]].shape
            sections["state"][first] = values
            for key, value in values.items():
                if does_clash(value, shape):
                    raise CheckpointError(
                        f"{title} has {key} of {name} in the shape {list(value.shape)}, but {self.folder} has the parameter in "
                        f"{list(shape)}; copy both files of one save, or pass load_optimizer=False"
                    )
                is_elementwise = isinstance(value, torch.Tensor) and value.dim() > 0 and tuple(value.shape) == shape
                pieces.setdefault(key, {})[first] = Piece(whole_object=not is_elementwise)
        for name, value in half.get("masters", {}).items():
            sections["masters"][known[name]] = value
            pieces.setdefault(MASTER, {})[known[name]] = Piece()
        manifest.pieces[self.folder.name] |= pieces
        kind = type(states.optimizer.optimizer).__name__
        manifest.optimizer = OptimizerRecord(
            kind, [{"params": [known[name] for name in group]} for group in saved.names]
        )
        file = self.folder.name
        content = {**self._files[file], **sections}
        super().__init__(self.folder, manifest)
        self._files[file] = content


class FullLoading(PartialLoad):
    """A full checkpoint with optimizer state that is read by names.

    The numbers of parameters do not suffice, because the model's parameters differ from the saved ones.
    """

    def __init__(
        self,
        session: Session,
        checkpoint: FoundCheckpoint,
        model: DistributedModel,
        states: WithStates,
        *,
        strict: bool,
        reader: FullReader,
    ) -> None:
        self._saved = states.saved.state
        super().__init__(session, checkpoint, model, states.optimizer, strict=strict, states=True, reader=reader)

    def _load_settings(self) -> None:
        if self._optimizer is not None:
            load_full_settings(self._optimizer, self._saved)

    def load_tensors(self) -> None:
        """See :class:`PartialLoad`."""
        if self._optimizer is not None:
            check_has_masters(self._model, self._optimizer)
        super().load_tensors()


def load_full_settings(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> None:
    """Load the settings of groups, and the loss scale."""
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update(copy_tensors({key: value for key, value in saved.items() if key not in ("params", "param_names")}))
    optimizer.load_loss_scale((state.get(HALF_KEY) or {}).get("loss_scaler"))


def check_has_masters(model: DistributedModel, optimizer: DistributedOptimizer) -> None:
    """Make sure that float32 weights can be loaded, now that the model was partitioned.

    Raises:
        CheckpointError: the optimizer has none.
    """
    if model.precision.is_half and not optimizer.updates(model):
        raise CheckpointError(
            "the state of a resumed optimizer, with the float32 weights, cannot be loaded: the model was partitioned, and the "
            "optimizer has none of its parameters; create it from model.parameters() of the wrapped model"
        )
