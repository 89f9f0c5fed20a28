"""Loading a partial checkpoint into a model of any topology: everything is checked first, then streamed."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from smp_config import Group
from smp_runtime.checkpoint.files.manifest import EXTRA, MODULE, PARTITION, POSITIONS, FoundCheckpoint, Manifest
from smp_runtime.checkpoint.files.name_translation import CheckpointNames, TranslatedTensor, read_into
from smp_runtime.checkpoint.files.reader import CheckpointReader
from smp_runtime.checkpoint.live_state import (
    Holding,
    Updated,
    live_buffers,
    live_extras,
    live_masters,
    live_weights,
    random_file,
    saved_records,
    updated_parameters,
)
from smp_runtime.errors import CheckpointError, SMPUserError
from smp_runtime.optim.kinds.expected_state import refuse_state_of_others
from smp_runtime.pipeline.partition.assignment import Assignment
from smp_runtime.tensors.nested import copy_tensors

if TYPE_CHECKING:
    from smp_runtime.checkpoint.files.records import OptimizerRecord
    from smp_runtime.checkpoint.files.tensor_regions import TensorRegion
    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.optim.distributed_optimizer import DistributedOptimizer

logger = logging.getLogger("smp")

#: A tensor to load: its first name, all of its names, and its shape.
_Wanted = tuple[str, tuple[str, ...], tuple[int, ...]]


class PartialLoad:
    """One partial checkpoint on its way into this rank's model and optimizer.

    Args:
        optimizer: to load into; None leaves its state alone.
        strict: whether both must have the same names.
        states: whether the optimizer's own state is loaded, or only float32 weights and the loss scale.
        reader: of the checkpoint's tensors; default: one of its folder.

    Raises:
        CheckpointError: names or shapes differ.
    """

    def __init__(
        self,
        session: Session,
        checkpoint: FoundCheckpoint,
        model: DistributedModel,
        optimizer: DistributedOptimizer | None,
        *,
        strict: bool,
        states: bool,
        reader: CheckpointReader | None = None,
    ) -> None:
        if checkpoint.manifest is None:
            raise AssertionError("a checkpoint without manifest cannot be loaded")
        self._session = session
        self._model = model
        self._optimizer = optimizer
        self._states = states and optimizer is not None
        self._strict = strict
        self.folder = checkpoint.folder
        self.manifest: Manifest = checkpoint.manifest
        self.reader = reader or CheckpointReader(checkpoint.folder, self.manifest, checkpoint.identity)
        self._state_keys = self.reader.state_keys()
        self._title = f"the checkpoint {checkpoint.folder.parent / checkpoint.name}"
        records = saved_records(model)
        to_ours = [ours for _, ours in session.module_manager.translate_functions]
        self._names = CheckpointNames(self.manifest, [(r.names, tuple(r.shape)) for r in records], to_ours)
        self._of: dict[str, TranslatedTensor] = {}
        self._check_model()
        if self._states and optimizer is not None:
            self._check_groups(updated_parameters(model, optimizer), len(optimizer.original_groups()))

    # -- before anything is written --------------------------------------------------------------------------------

    def _check_model(self) -> None:
        """Find a source for everything that the model has, on any stage.

        Raises:
            CheckpointError: the names differ and ``strict`` is on, or shapes differ.
        """
        records = saved_records(self._model)
        wanted: list[_Wanted] = [(record.name, record.names, tuple(record.shape)) for record in records]
        parameters = set(itertools.chain.from_iterable(record.names for record in records))
        wanted += self._buffers_beside(parameters)
        missing = []
        shapes: dict[str, str] = {}
        for name, names, shape in wanted:
            found = self._names.find(names)
            if found is None:
                # A translation leaves out buffers that are computed, such as masks.
                if name in parameters or not self._names.is_translated:
                    missing.append(name)
            elif tuple(found.shape) != shape:
                shapes[name] = f"{name} is {list(shape)} here and {list(found.shape)} there"
            else:
                self._of[name] = found
        in_no_state = self._in_no_state()
        unused = self._names.unused(self._of.values())
        unexpected = [name for name in unused if name not in in_no_state and name not in shapes]
        differs = bool(missing or unexpected)
        if shapes or (self._strict and differs):
            self._refuse_model(list(shapes.values()), missing, unexpected)
        if differs and self._session.ranks.rank == 0:
            logger.warning(
                "%s is loaded without %s; not used of it: %s", self._title, _some(missing), _some(unexpected)
            )

    def _buffers_beside(self, parameters: Container[str]) -> Iterator[_Wanted]:
        for name, value in self._model.module.state_dict(keep_vars=True).items():
            is_parameter = name in parameters
            if isinstance(value, torch.Tensor) and not is_parameter:
                yield name, (name,), tuple(value.shape)

    def _refuse_model(self, shapes: list[str], missing: list[str], unexpected: list[str]) -> NoReturn:
        """Raise an error with the differences between the checkpoint and the model."""
        problems = []
        if shapes:
            problems.append(f"other shapes: {_some(shapes)}")
        if missing:
            problems.append(f"it lacks {_some(missing)}")
        if unexpected:
            problems.append(f"it has {_some(unexpected)}, which the model has not")
        advice = "build the model as when it was saved"
        if not shapes:
            advice += ", or pass strict=False"
        kind = type(self._model.module).__name__
        raise CheckpointError(f"{self._title} does not fit this {kind}: {'; '.join(problems)}; {advice}")

    def _in_no_state(self) -> Container[str]:
        """Return tensors that are read in another way than by the names of a ``state_dict``."""
        return ()

    def _check_groups(self, entries: Sequence[Updated], count: int) -> None:
        """Check that the optimizer has the parameter groups that were saved, and keeps the same values.

        Args:
            count: of its groups; some may be empty.

        Raises:
            CheckpointError: it has not, or none was saved.
        """
        saved = self.manifest.optimizer
        if saved is None:
            raise CheckpointError(f"{self._title} has no optimizer state; resume with load_optimizer=False")
        if not self._has_same_groups(saved, entries, count):
            here = [sum(entry.group == index for entry in entries) for index in range(count)]
            there = [len(group["params"]) for group in saved.groups]
            raise CheckpointError(
                f"the optimizer state in {self._title} has {len(there)} groups with {there} parameters, but the optimizer has "
                f"{here}, or others; build it from the same parameter groups as when it was saved, or pass load_optimizer=False"
            )
        if self._optimizer is None:
            return
        inner, kind = self._optimizer.optimizer, type(self._optimizer.optimizer).__name__
        refuse_state_of_others(inner, saved.groups, self._state_keys.values(), self._title, saved.type)
        if saved.type != kind and self._session.ranks.rank == 0:
            logger.warning("%s has the state of %s, which is loaded into %s", self._title, saved.type, kind)

    def _has_same_groups(self, saved: OptimizerRecord, entries: Sequence[Updated], count: int) -> bool:
        """Return whether the optimizer's groups hold the same parameters as those that were saved."""
        if len(saved.groups) != count:
            return False
        owner: dict[str, int] = {}
        for index, group in enumerate(saved.groups):
            owner |= dict.fromkeys(group["params"], index)
        covered: set[str] = set()
        for entry in entries:
            found = self._of.get(entry.name)
            sources = () if found is None else found.sources
            is_in_another = any(owner.get(source) != entry.group for source in sources)
            if is_in_another:
                return False
            covered.update(sources)
        return not self._strict or covered >= set(owner)

    def files(self) -> set[str] | None:
        """Return the files that this rank reads; None as long as they are unknown."""
        tensors = self._files_of_tensors()
        if tensors is None:
            return None
        rank = self._session.ranks.rank
        found = {name for name in self.manifest.files if name in (PARTITION, POSITIONS, "user_content.pt")}
        if self.same_topology and random_file(rank) in self.manifest.files:
            found.add(random_file(rank))
        return found | self._settings_files() | tensors

    def _files_of_tensors(self) -> set[str] | None:
        """Return the files with the tensors and extra module states that this rank reads; None if unknown."""
        if not self._model.partitioned and not self._fits_partition():
            return None
        extra = {file for file, keys in self.manifest.pieces.items() if EXTRA in keys}
        return extra | (self._files_of_parts() if self._model.partitioned else self._files_of_stage())

    def _files_of_stage(self) -> set[str]:
        """Return the files with tensors of this stage in the partition that will be adopted."""
        stage = self._session.ranks.rank_in(Group.PP)
        tensors = {**self.manifest.parameters, **self.manifest.buffers}
        names = {name for name, record in tensors.items() if record.stage == stage}
        return {
            file
            for file, keys in self.manifest.pieces.items()
            if any(name in names for pieces in keys.values() for name in pieces)
        }

    def _files_of_parts(self) -> set[str]:
        """Return the files with a part of this rank's tensors."""
        found: set[str] = set()
        for holding in (*live_weights(self._model), *live_masters(self._model), *live_buffers(self._model)):
            for source in self._sources(holding.name):
                key = self.reader.weight_key(source)
                found.update(self._files_of(key, source, holding.name, holding.region))
        if self._states and self._optimizer is not None:
            found |= self._files_of_states(self._optimizer)
        return found

    def _files_of_states(self, optimizer: DistributedOptimizer) -> set[str]:
        found: set[str] = set()
        for entry in updated_parameters(self._model, optimizer):
            has_state = entry.updated is not None and entry.region.elements > 0
            if not has_state:
                continue
            for source in self._sources(entry.name):
                for key in self._state_keys.get(source, ()):
                    found.update(self._files_of(key, source, entry.name, entry.region))
        return found

    def _settings_files(self) -> set[str]:
        """Return the files with the settings of parameter groups and the loss scale."""
        first = sorted(name for name in self.manifest.files if name.startswith("optimizer_"))[:1]
        half = sorted(name for name in self.manifest.files if name.startswith("fp16_states_"))[:1]
        return {*first, *half} if self._optimizer is not None else set()

    def _files_of(self, key: str, source: str, name: str, region: TensorRegion) -> list[str]:
        plain = self._of[name].is_leaf_of_checkpoint
        return self.reader.files_with(key, source, region if plain else None)

    def _sources(self, name: str) -> tuple[str, ...]:
        found = self._of.get(name)
        return found.sources if found is not None else ()

    @property
    def same_topology(self) -> bool:
        """Return whether ranks correspond to those that saved."""
        saved, session = self.manifest.topology, self._session
        mine = {
            "world_size": session.ranks.control.size,
            "pipeline": session.ranks.size(Group.PP),
            "tensor": session.ranks.size(Group.TP),
            "placement": session.ranks.topology.placement,
        }
        return all(saved.get(key) == value for key, value in mine.items())

    def _fits_partition(self) -> bool:
        return (
            self.manifest.topology.get("pipeline") == self._session.ranks.size(Group.PP)
            and PARTITION in self.manifest.files
        )

    # -- loading ---------------------------------------------------------------------------------------------------

    def adopt_partition(self) -> None:
        """Let a model that is not partitioned yet have the partition that was saved, if it fits."""
        if self._model.partitioned or not self._fits_partition():
            return
        try:
            assignment = self._saved_partition()
            assignment.check(self._model.module, self._session.ranks.size(Group.PP))
        except SMPUserError as error:
            if self._session.ranks.rank == 0:
                logger.info("the model is partitioned anew: %s", error)
            return
        self._model.adopt(assignment)

    def _saved_partition(self) -> Assignment:
        """Return the partition from the folder that was verified, even if another one has its name now."""
        try:
            return Assignment.from_dict(json.loads(self.reader.files.text(PARTITION)))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self._title} has no partition in {PARTITION} ({error}); resume from another tag"
            ) from None

    def check(self) -> None:
        """Check that the files of this rank agree with the manifest; load nothing.

        Raises:
            CheckpointError: they do not.
        """
        wanted = self._files_of_tensors()
        files = list(self.manifest.pieces)
        if wanted is not None:
            files = [file for file in files if file in wanted]
        self.reader.check(files)
        if self._optimizer is not None:
            self.reader.settings()
            self.reader.loss_scale()
        if not self._model.partitioned and self._fits_partition():
            self._saved_partition()

    def positions(self) -> Any:
        """Return the saved job's positions in its data sets; empty if they were not counted.

        Raises:
            CheckpointError: the file of positions is damaged.
        """
        if POSITIONS not in self.manifest.files:
            return {}
        try:
            return json.loads(self.reader.files.text(POSITIONS))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self._title} has no positions in data sets in {POSITIONS} ({error}); resume from another tag"
            ) from None

    def load(self) -> None:
        """Load now, or as soon as the parameters have a stage; settings of the optimizer are loaded now."""
        self._load_settings()
        if self._model.partitioned:
            self.load_tensors()
            return
        self.reader.open(self.manifest.pieces)
        self._model.load_when_partitioned(self.load_tensors)

    def _load_settings(self) -> None:
        optimizer = self._optimizer
        if optimizer is None:
            return
        settings = self.reader.settings()
        if self._states and settings is not None:
            for group, saved in zip(optimizer.param_groups, settings, strict=True):
                # Copies, since tensors of the file are mapped memory: the next save may replace the file.
                values = {key: value for key, value in saved.items() if key != "params"}
                group.update(copy_tensors(values))
        has_loss_scale = any(file.startswith("fp16_states_") for file in self.manifest.files)
        if has_loss_scale:
            optimizer.load_loss_scale(self.reader.loss_scale())

    @torch.no_grad()
    def load_tensors(self) -> None:
        """Fill this rank's weights, masters, buffers and optimizer state from the files, tensor by tensor."""
        if self._model.shards is not None:
            self._model.shards.release()
        self.load_named(None)
        for name, module in live_extras(self._model):
            value = self.reader.extra(name)
            if value is not None:
                module.set_extra_state(copy_tensors(value))
        self.reader.close()

    @torch.no_grad()
    def load_named(self, only: Container[str] | None) -> None:
        """Fill what this rank has of tensors with these names, in its own model; None means all."""

        def is_wanted(name: str) -> bool:
            return only is None or name in only

        reader = self.reader
        for holding, key in self._holdings():
            if holding.name in self._of and is_wanted(holding.name):
                read_into(holding.tensor, holding.region, self._of[holding.name], reader, key)
        optimizer = self._optimizer if self._states else None
        if optimizer is None:
            return
        for entry in updated_parameters(self._model, optimizer):
            if is_wanted(entry.name):
                self._load_state(optimizer, entry)

    def _holdings(self) -> Iterator[tuple[Holding, Callable[[str], str]]]:
        """Yield this rank's tensors except optimizer state, each with a function from name to state key."""
        for holding in (*live_weights(self._model), *live_masters(self._model)):
            yield holding, self.reader.weight_key
        for holding in live_buffers(self._model):
            yield holding, always_key(MODULE)

    def _load_state(self, optimizer: DistributedOptimizer, entry: Updated) -> None:
        found = self._of.get(entry.name)
        if entry.updated is None or found is None or entry.parameter.is_meta:
            return
        former = optimizer.optimizer.state.get(entry.updated, {})
        state: dict[str, Any] = {}
        keys = self._state_keys.get(found.sources[0], ())
        group = optimizer.param_groups[entry.group]
        on_device = bool(group.get("fused") or group.get("capturable"))
        for key in keys:
            if not all(self.reader.holds(key, source) for source in found.sources):
                continue
            if self.reader.is_object(key, found.sources[0]):
                bounds = entry.region.cuts if entry.region.axis is not None else None
                state[key] = _own(self.reader.object(key, found.sources[0], bounds), entry.updated, on_device)
                continue
            dtype = self._state_type(self.reader.dtype_of(key, found.sources[0]), entry.updated.dtype)
            target = former.get(key)
            if not isinstance(target, torch.Tensor) or target.shape != entry.updated.shape or target.dtype != dtype:
                former.pop(key, None)
                target = torch.empty_like(entry.updated, dtype=dtype, memory_format=torch.contiguous_format)
            read_into(target, entry.region, found, self.reader, always_key(key))
            state[key] = target
        if state:
            optimizer.optimizer.state[entry.updated] = state
        else:
            optimizer.optimizer.state.pop(entry.updated, None)

    def _state_type(self, saved: torch.dtype, updated: torch.dtype) -> torch.dtype:
        """Return the type in which a state is kept: the parameter's for floating point, as PyTorch does when loading."""
        return updated if saved.is_floating_point else saved


def always_key(key: str) -> Callable[[str], str]:
    """Return a function that returns this state key for every name."""
    return lambda name: key


def _own(value: Any, updated: torch.Tensor, on_device: bool) -> Any:
    """Return a copy of an optimizer state object that does not share memory with the file.

    Counters stay on the CPU unless a kernel reads them.
    """
    if not isinstance(value, torch.Tensor):
        return copy_tensors(value)
    return value.to(updated.device, copy=True) if on_device or value.dim() > 0 else value.clone()


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return (shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")) or "nothing"
