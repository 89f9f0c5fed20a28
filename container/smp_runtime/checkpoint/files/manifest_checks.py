"""Whether what a manifest says can be: types, names that stay in their folder, numbers within their bounds."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from smp_runtime.checkpoint.files.opened_files import is_plain_name

if TYPE_CHECKING:
    from smp_runtime.checkpoint.files.manifest import FileRecord, Manifest, Piece, TensorRecord

#: Where the manifest keeps the checksum of all the rest of it.
DIGEST = "digest"
#: Elements that a tensor may have: more could not be counted in bytes.
_MOST_ELEMENTS = 2**58
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TYPE = re.compile(r"bool|(?:float|bfloat|int|uint|complex)\d+(?:_\w+)?")
_DEGREES = ("world_size", "pipeline", "tensor", "sharded")


def digest_of(data: Mapping[str, Any]) -> str:
    """The sha256 of a manifest's content, hexadecimal.

    Spaces and line breaks do not count, so that tools may write it in another layout; the order of names does.

    Args:
        data: as JSON has it; a digest that it holds is left out.
    """
    content = {key: value for key, value in data.items() if key != DIGEST}
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def check_manifest(manifest: Manifest) -> None:
    """Make sure that everything in a manifest is of its type and within its bounds.

    Raises:
        ValueError: something is not; it says what.
    """
    _check(_is_text(manifest.tag), "tag", manifest.tag)
    _check(_is_text(manifest.library), "library", manifest.library)
    _check(_is_text(manifest.precision), "precision", manifest.precision)
    _check(_is_text(manifest.save), "save", manifest.save)
    _check(_is_count(manifest.steps), "steps", manifest.steps)
    saved = manifest.saved
    _check(isinstance(saved, int | float) and math.isfinite(saved) and saved >= 0, "saved", saved)
    _check(_are_texts(manifest.translations), "translations", manifest.translations)
    _check(isinstance(manifest.topology, dict), "topology", manifest.topology)
    for key in _DEGREES:
        _check(_is_count(manifest.topology.get(key, 1)), f"topology.{key}", manifest.topology.get(key))
    for name, record in manifest.files.items():
        _check(is_plain_name(name), "files", name)
        _check_file(name, record)
    for name, tensor in (*manifest.parameters.items(), *manifest.buffers.items()):
        _check_tensor(name, tensor)
    for file, keys in manifest.pieces.items():
        _check(is_plain_name(file), "pieces", file)
        for key, pieces in keys.items():
            for name, piece in pieces.items():
                found = manifest.parameters.get(name) or manifest.buffers.get(name)
                _check_piece(f"pieces.{file}.{key}.{name}", piece, found)
    if manifest.optimizer is not None:
        _check(_is_text(manifest.optimizer.type), "optimizer.type", manifest.optimizer.type)
        _check(_are_texts(manifest.optimizer.states), "optimizer.states", manifest.optimizer.states)
        _check(isinstance(manifest.optimizer.groups, list), "optimizer.groups", manifest.optimizer.groups)
        for group in manifest.optimizer.groups:
            _check(isinstance(group, dict) and _are_texts(group.get("params")), "optimizer.groups", group)


def _check_file(name: str, record: FileRecord) -> None:
    _check(_is_count(record.bytes), f"files.{name}.bytes", record.bytes)
    _check(isinstance(record.copies, tuple), f"files.{name}.copies", record.copies)
    for found in (record.sha256, *record.copies):
        _check(isinstance(found, str) and _SHA256.fullmatch(found) is not None, f"files.{name}.sha256", found)


def _check_tensor(name: str, record: TensorRecord) -> None:
    _check(_are_counts(record.shape), f"{name}.shape", record.shape)
    _check(_product(record.shape) <= _MOST_ELEMENTS, f"{name}.shape", record.shape)
    _check(isinstance(record.dtype, str) and _TYPE.fullmatch(record.dtype) is not None, f"{name}.dtype", record.dtype)
    _check(isinstance(record.aliases, tuple) and _are_texts(record.aliases), f"{name}.aliases", record.aliases)
    _check(_is_count(record.stage), f"{name}.stage", record.stage)
    axis = record.tensor_axis
    _check(axis is None or (_is_count(axis) and axis < len(record.shape)), f"{name}.tensor_axis", axis)
    _check(isinstance(record.trained, bool), f"{name}.trained", record.trained)


def _check_piece(where: str, piece: Piece, record: TensorRecord | None) -> None:
    """Make sure that a piece lies in its tensor; ``record`` is None for what is in no list of tensors."""
    for part in (piece.tensor, piece.flat, piece.place):
        _check(part is None or (_are_counts(part) and len(part) % 2 == 0), where, part)
    if record is None:
        return
    elements = math.prod(record.shape)
    if piece.tensor is not None:
        axis = record.tensor_axis
        _check(axis is not None, where, piece.tensor)
        length = record.shape[axis or 0]
        runs = list(zip(piece.tensor[::2], piece.tensor[1::2], strict=True))
        _check(all(start <= stop <= length for start, stop in runs), where, piece.tensor)
        rest = math.prod(size for dim, size in enumerate(record.shape) if dim != axis)
        elements = rest * sum(stop - start for start, stop in runs)
    if piece.flat is not None:
        _check(len(piece.flat) == 2 and piece.flat[0] <= piece.flat[1] <= elements, where, piece.flat)
    _check(piece.place is None or len(piece.place) == 2, where, piece.place)


def _product(shape: Iterable[int]) -> int:
    """The product, without zeros: the layout of an empty tensor is counted as well."""
    return math.prod(max(size, 1) for size in shape)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(values: object) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _are_counts(values: object) -> bool:
    return isinstance(values, tuple) and all(_is_count(value) for value in values)


def _check(holds: bool, where: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{where} cannot be {repr(value)[:80]}")
