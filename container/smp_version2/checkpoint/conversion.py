"""Whole weights of a sharded checkpoint of version 2, read without its job; and whole weights written as such a checkpoint."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from smp_runtime.checkpoint.files.manifest import TensorRecord
from smp_runtime.checkpoint.files.name_translation import TranslatedTensor
from smp_runtime.checkpoint.full.conversion import Weights, make_whole, read_config, translate
from smp_runtime.errors import CheckpointError
from smp_runtime.parameters.registry import intervals
from smp_runtime.tensors.torch_private import name_without_wrappers
from smp_version2.checkpoint.filesystem import (
    DATA_ENDING,
    METADATA,
    DistributedFileSystemReader,
    DistributedFileSystemWriter,
)
from smp_version2.checkpoint.local_shards import LocalShard
from smp_version2.checkpoint.state_dict_loader import OF_THE_ORIGINAL, read_metadata, refusal_of_the_original
from smp_version2.moe.saved_experts import EXPERTS_FILE, FOLDER, SavedPart, check_parts
from smp_version2.split_parameters import SPLIT_FILE

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata

#: Keys under which scripts put the model's state, in the order in which they are looked for.
_MODEL_KEYS = ("model", "state_dict", "module")
#: Names of folders in scripts: the degree, and the rank.
_TENSOR = re.compile(r"tp(\d+)-\d+")
#: Folders that a message names.
_SHOWN = 4


@dataclass(frozen=True)
class _SavedPart:
    """What the ranks with one tensor coordinate have saved.

    Attributes:
        keys: in the checkpoint, by the names in the model.
        split: the content of :data:`SPLIT_FILE`; empty without tensor parallelism.
        experts: the content of :data:`EXPERTS_FILE`; empty without expert parallelism.
    """

    folder: Path
    metadata: Metadata
    keys: dict[str, str]
    split: dict[str, Any]
    experts: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> _SavedPart:
        """Read what describes a part.

        Raises:
            CheckpointError: it holds no model, or local shards.
        """
        metadata = read_metadata(DistributedFileSystemReader(folder))
        file = folder / SPLIT_FILE
        split = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        of_experts = folder / EXPERTS_FILE
        experts = json.loads(of_experts.read_text(encoding="utf-8")) if of_experts.is_file() else {}
        return cls(folder, metadata, _find_model(folder, metadata), split, experts)

    @property
    def place(self) -> tuple[int, int]:
        """Return the tensor parallel rank and degree."""
        return self.split.get("tensor_parallel_rank", 0), self.split.get("tensor_parallel_degree", 1)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as it was saved."""
        saved: Any = self.metadata.state_dict_metadata[self.keys[name]]
        return tuple(saved.size)

    def dtype(self, name: str) -> str:
        """Return the type of a tensor."""
        saved: Any = self.metadata.state_dict_metadata[self.keys[name]]
        return str(saved.properties.dtype).removeprefix("torch.")

    def value(self, name: str) -> torch.Tensor:
        """Return this part of a tensor."""
        key = self.keys[name]
        saved: Any = self.metadata.state_dict_metadata[key]
        made = torch.empty(saved.size, dtype=saved.properties.dtype)
        planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
        reader = DistributedFileSystemReader(self.folder)
        with _alone():
            checkpoint.load({key: made}, storage_reader=reader, planner=planner, no_dist=True)
        return made


@dataclass(frozen=True)
class _SharedExperts(_SavedPart):
    """One saved part joined from the parts of all expert parallel ranks that have the same tensor parallel rank.

    Attributes:
        parts: in the order of the ranks. The other attributes are those of the first part, with the names of all parts.
    """

    parts: tuple[_SavedPart, ...] = ()

    @classmethod
    def of(cls, found: list[_SavedPart]) -> _SharedExperts:
        """Take parts that :func:`check_parts` has checked."""
        first = found[0]
        keys: dict[str, str] = {}
        # In reverse, so that the first part with a name sets its key.
        for part in reversed(found):
            keys |= part.keys
        split = dict(first.split)
        if split:
            slices: dict[str, Any] = {}
            for part in found:
                slices |= part.split.get("slices", {})
            split["slices"] = slices
        return cls(first.folder, first.metadata, keys, split, first.experts, tuple(found))

    def _with(self, name: str) -> list[_SavedPart]:
        """Return the parts that have a tensor or some of its experts."""
        having = [part for part in self.parts if name in part.keys]
        experts = self.experts["tables"].get(name)
        is_shared = experts is not None and having[0].shape(name)[0] * len(self.parts) == experts
        return having if is_shared else having[:1]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor with all experts."""
        having = self._with(name)
        shape = having[0].shape(name)
        return (shape[0] * len(having), *shape[1:]) if len(having) > 1 else shape

    def dtype(self, name: str) -> str:
        """Return the type of a tensor."""
        return self._with(name)[0].dtype(name)

    def value(self, name: str) -> torch.Tensor:
        """Return this part of a tensor, with all experts."""
        values = [part.value(name) for part in self._with(name)]
        return torch.cat(values) if len(values) > 1 else values[0]


def read_weights_of_version_2(path: Path, config: str | None) -> Weights | None:
    """Return the model's weights of a sharded checkpoint; None if there is none of version 2.

    Args:
        path: the checkpoint, or the folder with one for each tensor parallel rank.
        config: file with the model's configuration; default: ``config.json`` in ``path``.

    Raises:
        CheckpointError: several checkpoints, a part of one, or one whose tensors cannot be joined.
    """
    if not path.is_dir():
        return None
    for found in sorted(path.rglob(OF_THE_ORIGINAL)):
        raise refusal_of_the_original(found.parent)
    folders = sorted({found.parent for found in path.rglob(METADATA)})
    if not folders:
        return None
    saved = [_SavedPart.read(folder) for folder in folders]
    parts = sorted(_join_experts(path, saved), key=lambda part: part.place)
    _check(path, parts)
    tensors = {}
    for name in parts[0].keys:
        tensors[name] = TranslatedTensor.leaf(name, _describe(parts, name))
    return Weights(tensors, functools.partial(_join, parts), config=read_config(config, path))


def write_as_version_2(source: Weights, target: Path, dtype: str | None) -> tuple[list[Path], int]:
    """Write weights as a sharded checkpoint ``{"model": …}``, which loads at any ``hybrid_shard_degree``.

    Returns:
        The files, and the number of tensors under each of their names.
    """
    whole = make_whole(source, translate(source, dtype))
    with _alone():
        checkpoint.save({"model": whole}, storage_writer=DistributedFileSystemWriter(target), no_dist=True)
    return sorted(path for path in target.iterdir() if path.name == METADATA or path.suffix == DATA_ENDING), len(whole)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Leave out PyTorch's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _find_model(folder: Path, metadata: Metadata) -> dict[str, str]:
    """Return the keys of the model's tensors, by their names in it."""
    records = metadata.state_dict_metadata
    if any(LocalShard.of_key(key) for key in records):
        raise CheckpointError(
            f"{folder} has a local shard (SM_LOCAL_STATE_DICT), which only a job with the degrees of the save reads; load it "
            "there, and save with SHARDED_STATE_DICT"
        )
    paths = {key: tuple(map(str, path)) for key, path in (metadata.planner_data or {}).items()}
    model_key = _find_model_key(folder, paths.values())
    found = {}
    for key, record in records.items():
        if not isinstance(record, TensorStorageMetadata):
            continue
        if model_key is None:
            path = paths.get(key, (key,))
        elif paths[key][0] == model_key:
            path = paths[key][1:]
        else:
            continue
        name = name_without_wrappers(".".join(path))
        found[name] = key
    return found


def _find_model_key(folder: Path, paths: Collection[tuple[str, ...]]) -> str | None:
    """Return the key that the model's state is under; None if the checkpoint is the model's state itself.

    Raises:
        CheckpointError: the tensors are under other keys.
    """
    outermost = {path[0] for path in paths}
    for key in _MODEL_KEYS:
        if key in outermost:
            return key
    if any(len(path) > 1 for path in paths):
        raise CheckpointError(
            f"{folder} has the keys {', '.join(sorted(outermost))}, and none of {', '.join(_MODEL_KEYS)}, under which a model is "
            'looked for; save {"model": model.state_dict()}'
        )
    return None


def _join_experts(path: Path, parts: list[_SavedPart]) -> list[_SavedPart]:
    """Return one part for each tensor coordinate, with all experts.

    Raises:
        CheckpointError: parts of some expert parallel ranks are missing.
    """
    made: list[_SavedPart] = []
    shared: dict[tuple[int, int], list[_SavedPart]] = {}
    for part in parts:
        if _place_of_experts(part).place[0] > 1:
            shared.setdefault(part.place, []).append(part)
        else:
            made.append(part)
    for found in shared.values():
        by_folder = {_place_of_experts(part).place: part for part in found}
        ordered = check_parts(str(path), [_place_of_experts(part) for part in found])
        made.append(_SharedExperts.of([by_folder[each.place] for each in ordered]))
    return made


def _place_of_experts(part: _SavedPart) -> SavedPart:
    named = next((name for name in reversed(part.folder.parts) if FOLDER.fullmatch(name)), "")
    return SavedPart(named, part.metadata, part.experts)


def _check(path: Path, parts: list[_SavedPart]) -> None:
    """Raise an error unless the parts are all of one checkpoint."""
    shown = ", ".join(str(part.folder) for part in parts[:_SHOWN])
    for part in parts:
        tensor = max((int(found[1]) for found in map(_TENSOR.fullmatch, part.folder.parts) if found), default=1)
        if tensor > 1 and not part.split:
            raise CheckpointError(
                f"{part.folder} is of one of {tensor} tensor parallel ranks and has no {SPLIT_FILE}, which says how tensors were "
                "split: save with torch.sagemaker.distributed.checkpoint.state_dict_saver, or a full state dict"
            )
    places = [part.place for part in parts]
    degree = places[0][1]
    if places == [(rank, degree) for rank in range(degree)]:
        return
    if len(parts) > degree:
        raise CheckpointError(f"{path} has {len(parts)} checkpoints: give one of them, such as {shown}")
    raise CheckpointError(
        f"{path} has the parts of {len(parts)} of {degree} tensor parallel ranks ({shown}): give the folder that has all"
    )


def _slices(parts: list[_SavedPart], name: str) -> Iterator[tuple[_SavedPart, dict[str, Any]]]:
    """Yield the parts of a split tensor, with their places."""
    for part in parts:
        if name in part.split.get("unknown", ()):
            raise CheckpointError(
                f"{name} is in two models of the job that {part.folder} is of, split in different ways; save a full state dict"
            )
        where = part.split.get("slices", {}).get(name)
        if where is not None:
            yield part, where


def _describe(parts: list[_SavedPart], name: str) -> TensorRecord:
    split = next((where for _, where in _slices(parts, name)), None)
    shape = tuple(parts[0].shape(name) if split is None else split["shape"])
    return TensorRecord(shape, parts[0].dtype(name))


def _join(parts: list[_SavedPart], name: str) -> torch.Tensor:
    """Return a whole tensor from all parts."""
    split = list(_slices(parts, name))
    if not split:
        return parts[0].value(name)
    # FSDP makes full state dicts, whose tensors are gathered, if a rank shares its state with none; or one rank has all of it.
    for part, where in split:
        if part.shape(name) == tuple(where["shape"]):
            return part.value(name)
    whole: torch.Tensor | None = None
    for part, where in split:
        mine, dim, at = part.value(name), where["dim"], 0
        if whole is None:
            whole = torch.empty(where["shape"], dtype=mine.dtype)
        for start, stop in intervals(where["bounds"]):
            whole.narrow(dim, start, stop - start).copy_(mine.narrow(dim, at, stop - start))
            at += stop - start
    assert whole is not None
    return whole
