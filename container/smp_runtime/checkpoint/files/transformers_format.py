"""Weights as Transformers keeps them: ``model.safetensors`` or ``pytorch_model.bin``, in one file or in shards with an index."""

from __future__ import annotations

import contextlib
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from smp_config.errors import kind_of
from smp_runtime.checkpoint.files.atomic_file import (
    SAVE_ID,
    UNREADABLE,
    Records,
    marked_state,
    refuse_inflated,
    write_tensors,
    write_text,
)
from smp_runtime.checkpoint.files.opened_files import is_plain_name, open_regular, read_text, refuse_other_kinds
from smp_runtime.checkpoint.files.safetensors_writer import as_it_is, size_of, write_safetensors
from smp_runtime.errors import CheckpointError, SMPUserError

SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"
CONFIG = "config.json"
INDEX = ".index.json"
#: Names of weight files in a folder, in the order in which Transformers looks.
_KNOWN = (SAFETENSORS, SAFETENSORS + INDEX, PICKLED, PICKLED + INDEX)
#: Largest file of weights, in bytes; Transformers' own bound.
LARGEST_FILE = 5 * 10**9


#: Bytes of units; ``GB`` as Transformers counts.
_UNITS = {"GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1, "": 1}


def bytes_in(size: int | str) -> int:
    """Return the number of bytes in a number, or in a text like ``"5GB"``.

    Raises:
        SMPUserError: it is none.
    """
    text = str(size).strip().upper()
    number = text.rstrip("GIKMB")
    try:
        count = int(float(number) * _UNITS[text.removeprefix(number)])
    except (ValueError, KeyError):
        count = 0
    if count < 1:
        raise SMPUserError(
            f"the largest file is {size!r}; write a number and a unit, for example 5GB or 500MB", code="SMP402"
        )
    return count


def is_transformers_name(name: str) -> bool:
    """Return whether a full checkpoint of this name is written so that Transformers loads its folder."""
    return name == PICKLED or name.endswith(".safetensors")


# -- reading ---------------------------------------------------------------------------------------------------------


def weights_of(path: Path) -> Path | None:
    """Return the file of weights, or their index, for a folder, a file, or the name of a sharded file.

    If ``model.safetensors`` or ``pytorch_model.bin`` is absent, the other one is used.
    """
    if path.is_file():
        return path
    if path.is_dir():
        candidates = [path / name for name in _KNOWN]
    else:
        candidates = [path.with_name(path.name + INDEX)]
        # Libraries may ask for one of Transformers' names although it wrote the other.
        if path.name in (SAFETENSORS, PICKLED):
            candidates += [path.with_name(name) for name in _KNOWN]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    return None


def read_weights(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Return all weights by name, mapped from their files; they are read when they are used.

    Args:
        path: a folder of Transformers, a file of ``torch.save`` or of safetensors, or an index of shards.

    Raises:
        CheckpointError: there are none, a shard is missing, or a file is damaged.
    """
    found = weights_of(path)
    if found is None:
        folder = path if path.is_dir() else path.parent
        near = sorted(p.name for p in folder.glob("*"))[:20] if folder.is_dir() else []
        raise CheckpointError(
            f"there is no checkpoint file {path}; its folder holds {near or 'nothing'}: check the path and the tag (weights of "
            f"Transformers are called {', '.join(_KNOWN)})"
        )
    if not found.name.endswith(INDEX):
        return _read_file(found, map_location)
    weights: dict[str, Any] = {}
    shards = _weight_map(found)
    files = {name: found.with_name(name) for name in sorted(set(shards.values()))}
    if missing := [name for name, file in files.items() if not file.is_file()]:
        raise CheckpointError(
            f"{found} names {len(files)} files, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing in "
            f"{found.parent}: copy the whole folder"
        )
    for file in files.values():
        weights |= _read_file(file, map_location)
    if absent := [name for name in shards if name not in weights]:
        raise CheckpointError(
            f"{found} names {len(shards)} tensors, but {shards[absent[0]]} lacks {absent[0]} (and {len(absent) - 1} more are "
            "missing): index and files are of different checkpoints; copy the whole folder again"
        )
    return weights


def save_ids(path: Path) -> dict[str, str | None]:
    """Return the id of the save that wrote each file of weights, by its path.

    The files are those that :func:`read_weights` reads.
    """
    found = weights_of(path)
    if found is None:
        return {}
    files = [found]
    if found.name.endswith(INDEX):
        files = [found.with_name(name) for name in sorted(set(_weight_map(found).values()))]
    ids: dict[str, str | None] = {}
    for file in files:
        refuse_other_kinds(file)
        if file.name.endswith(".safetensors"):
            from safetensors import safe_open

            with _safetensors(file), safe_open(file, "pt", device="cpu") as opened:
                ids[str(file)] = (opened.metadata() or {}).get(SAVE_ID)
        elif not zipfile.is_zipfile(file):  # older than ids, and not to be mapped
            ids[str(file)] = None
        else:
            ids[str(file)] = getattr(_unpickled(file, "cpu"), SAVE_ID, None)
    return ids


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(read_text(index))["weight_map"]
        if all(is_plain_name(file) for file in found.values()):
            return dict(found)
        problem = "it names files outside of its folder"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise CheckpointError(f"{index} is no index of weights ({problem}); copy it again")


@contextlib.contextmanager
def _safetensors(file: Path) -> Iterator[None]:
    """Raise CheckpointError if reading a safetensors file inside the block fails."""
    from safetensors import SafetensorError

    refuse_other_kinds(file)
    try:
        yield
    except (SafetensorError, *UNREADABLE) as error:
        raise _damaged(file, error) from error


def _read_file(file: Path, map_location: Any) -> dict[str, Any]:
    if file.name.endswith(".safetensors"):
        from safetensors import safe_open

        with _safetensors(file), safe_open(file, "pt", device="cpu") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return {name: value.to(map_location) for name, value in weights.items()}
    state = _unpickled(file, map_location)
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{file} holds {kind_of(state)}; a full checkpoint is a dictionary of tensors by name: save "
            "model.state_dict()"
        )
    return dict(state)


def _unpickled(file: Path, map_location: Any) -> Any:
    try:
        with os.fdopen(open_regular(file), "rb") as opened:
            refuse_inflated(file, opened)
        try:
            return torch.load(file, map_location=map_location, weights_only=True, mmap=True)
        except RuntimeError:  # the format before PyTorch 1.6 cannot be mapped
            return torch.load(file, map_location=map_location, weights_only=True)
    except CheckpointError:
        raise
    except UNREADABLE as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint file {file} cannot be read ({str(error).splitlines()[0] if str(error) else type(error).__name__}); it "
        "was cut, damaged or written by something else: copy it again, or use another tag"
    )


# -- writing ---------------------------------------------------------------------------------------------------------


def write_transformers(
    file: Path,
    weights: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None = None,
    largest_file: int = LARGEST_FILE,
    make: Callable[[torch.Tensor], torch.Tensor] = as_it_is,
    save_id: str | None = None,
    records: Records | None = None,
) -> list[Path]:
    """Write ``weights`` under Transformers' names, and ``config.json`` beside them.

    Args:
        file: ``model.safetensors`` for example; its ending decides the format. If the weights are larger than
            ``largest_file``, there are shards ``model-00001-of-00003.safetensors`` and
            ``model.safetensors.index.json``.
        weights: each tensor once, whatever names it has in the model.
        config: of the model, as a dictionary.
        largest_file: in bytes; a tensor that is larger has a file of its own.
        make: returns the values of a tensor that may have none yet; for safetensors one after the other.
        records: takes the lengths and checksums of all files that are written.

    Returns:
        The files of weights.

    Raises:
        SMPUserError: a type that the format does not have.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    former = set(files_of(file))
    shards = list(_shards(weights, largest_file))
    stem, ending = file.name.rsplit(".", 1)
    names = [file.name]
    if len(shards) > 1:
        names = [f"{stem}-{number:05d}-of-{len(shards):05d}.{ending}" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        target = file.with_name(name)
        if ending == "safetensors":
            write_safetensors(target, shard, make, {SAVE_ID: save_id} if save_id is not None else None, records)
        else:
            made = {key: make(value).detach().cpu() for key, value in shard.items()}
            write_tensors(made if save_id is None else marked_state(made, save_id), target, records)
    written = [file.with_name(name) for name in names]
    if len(shards) > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {
            "metadata": {"total_size": sum(size_of(value) for value in weights.values())},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_text(json.dumps(index, indent=2) + "\n", file.with_name(file.name + INDEX), records)
    if config is not None:
        text = json.dumps(_config_for(config, weights), indent=2, sort_keys=True) + "\n"
        write_text(text, file.with_name(CONFIG), records)
    # What an earlier checkpoint of this name has left would be found first, or lie there for nothing.
    keep = {*written, *([file.with_name(file.name + INDEX)] if len(shards) > 1 else [])}
    for path in former - keep:
        path.unlink(missing_ok=True)
    return written


def files_of(file: Path) -> Iterator[Path]:
    """Yield the existing files of a checkpoint with the name ``file``, whole or in shards."""
    if not file.parent.is_dir():
        return
    whole = (file.name, file.name + INDEX)
    of_a_shard = re.compile(rf"{re.escape(file.stem)}-\d{{5}}-of-\d{{5}}{re.escape(file.suffix)}")
    for path in file.parent.iterdir():
        is_shard = of_a_shard.fullmatch(path.name) is not None
        if is_shard or path.name in whole:
            yield path


def _shards(weights: Mapping[str, torch.Tensor], largest_file: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, value in weights.items():
        if shard and size + size_of(value) > largest_file:
            yield shard
            shard, size = {}, 0
        shard[name] = value
        size += size_of(value)
    yield shard


def _config_for(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the configuration with the type of the weights as ``torch_dtype``, if they have a single one."""
    types = {value.dtype for value in weights.values() if value.dtype.is_floating_point}
    kept = dict(config)
    if len(types) == 1:
        # Transformers 5 writes the same setting as "dtype".
        kept.pop("dtype", None)
        kept["torch_dtype"] = str(types.pop()).removeprefix("torch.")
    return kept


def config_of(module: Any) -> dict[str, Any] | None:
    """Return the configuration of a module of Transformers, or None for any other module."""
    config = getattr(module, "config", None)
    to_json = getattr(config, "to_json_string", None)
    if not callable(to_json):
        return None
    found = dict(json.loads(to_json()))
    if found.get("architectures"):
        return found
    name = getattr(module, "replaced_class", None)
    if not name and hasattr(module, "base_model_prefix"):
        name = type(module).__name__
    if name:
        found["architectures"] = [name]
    return found
