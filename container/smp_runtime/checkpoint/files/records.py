"""The records of a manifest (files, tensors, pieces, the optimizer) and their validation."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smp_runtime.checkpoint.files.checksums import CRC32, SHA256, can_compare, is_checksum

#: Key of the checksum of the rest of the manifest.
DIGEST = "digest"
#: Elements that a tensor may have: more could not be counted in bytes.
_MOST_ELEMENTS = 2**58
_TYPE = re.compile(r"bool|(?:float|bfloat|int|uint|complex)\d+(?:_\w+)?")


def digest_of(data: Mapping[str, Any]) -> str:
    """Return the hexadecimal SHA-256 of a manifest's content.

    Spaces and line breaks do not count, so that tools may change the layout. The order of names counts.

    Args:
        data: the parsed JSON; a digest in it is left out.
    """
    content = {key: value for key, value in data.items() if key != DIGEST}
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint.

    Attributes:
        bytes: its length.
        checksum: the name of a hash and its hexadecimal value (see :mod:`.checksums`).
        copies: checksums of the copies that other hosts have written into folders of their own, if they differ.
    """

    bytes: int
    checksum: str
    copies: tuple[str, ...] = ()

    @classmethod
    def from_older(cls, record: Mapping[str, Any]) -> FileRecord:
        """Return the record of a manifest of format 3 or older."""
        kind = CRC32 if record.get("of_headers", False) is True else SHA256
        copies = tuple(f"{kind}:{found}" for found in record.get("copies", ()))
        return cls(record["bytes"], f"{kind}:{record['sha256']}", copies)

    @property
    def checksums(self) -> tuple[str, ...]:
        """Return the checksums that the file may have."""
        return (self.checksum, *self.copies)

    @property
    def can_be_compared(self) -> bool:
        """Return whether this process has the hashes of all checksums."""
        return all(map(can_compare, self.checksums))

    def check(self, where: str) -> None:
        """Make sure that it can be; raises ValueError, as all checks here."""
        check_count(self.bytes, f"{where}.bytes")
        check(isinstance(self.copies, tuple), f"{where}.copies", self.copies)
        for found in self.checksums:
            check(is_checksum(found), f"{where}.checksum", found)


@dataclass(frozen=True)
class TensorRecord:
    """A parameter or a buffer.

    Attributes:
        shape: of the whole tensor.
        dtype: in which the model had it, such as ``"float32"``.
        tensor_axis: dim along which tensor parallel ranks had parts, or None.
        trained: whether it was a parameter with ``requires_grad``.
    """

    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()
    stage: int = 0
    tensor_axis: int | None = None
    trained: bool = True

    @property
    def elements(self) -> int:
        """Return the number of elements of the whole tensor."""
        return math.prod(self.shape)

    def check(self, where: str) -> None:
        """Make sure that it can be."""
        check(_are_counts(self.shape), f"{where}.shape", self.shape)
        check(_product(self.shape) <= _MOST_ELEMENTS, f"{where}.shape", self.shape)
        check(isinstance(self.dtype, str) and _TYPE.fullmatch(self.dtype) is not None, f"{where}.dtype", self.dtype)
        check(isinstance(self.aliases, tuple) and are_texts(self.aliases), f"{where}.aliases", self.aliases)
        check_count(self.stage, f"{where}.stage")
        axis = self.tensor_axis
        check(axis is None or (_is_count(axis) and axis < len(self.shape)), f"{where}.tensor_axis", axis)
        check(isinstance(self.trained, bool), f"{where}.trained", self.trained)


@dataclass(frozen=True)
class TensorPiece:
    """Which part of a tensor a file has.

    The part is the elements ``flat`` of the flattened slice ``tensor`` of the whole tensor.

    Attributes:
        tensor: start and stop along the record's ``tensor_axis``, of several runs one after the other; None for all of it.
        flat: start and stop in the flattened slice; None for all of it.
        place: index of the flat buffer in ``fp32_flat_groups`` and first element there; None when the part is a
            tensor of its own, ``file[key][name]`` (for optimizer states ``file["state"][name][key]``).
        whole_object: no part of the tensor, but an object that belongs to all of it, such as a step counter.
    """

    tensor: tuple[int, ...] | None = None
    flat: tuple[int, int] | None = None
    place: tuple[int, int] | None = None
    whole_object: bool = False

    def to_list(self) -> list[Any]:
        """Return the piece in the format of the manifest."""
        cuts: Sequence[Any] | None = self.tensor
        if cuts is not None and len(cuts) > 2:  # several runs are one entry
            cuts = [[*cuts], None]
        if self.whole_object:
            return [] if cuts is None else [*cuts]
        values = [*(cuts or (None, None))]
        values += self.flat or (None, None)
        if self.place:
            values += self.place
        return values

    @classmethod
    def from_list(cls, values: list[Any]) -> TensorPiece:
        """Return a piece from the format of the manifest."""
        cuts = None
        if values and isinstance(values[0], list):
            cuts = tuple(values[0])
        if len(values) in (0, 2):
            whole = tuple(values) if values else None
            return cls(tensor=cuts or whole, whole_object=True)
        pairs: list[tuple[Any, Any] | None] = []
        for start in range(0, len(values), 2):
            is_given = values[start] is not None
            pairs.append((values[start], values[start + 1]) if is_given else None)
        place = pairs[2] if len(pairs) > 2 else None
        return cls(cuts or pairs[0], pairs[1], place)

    def check(self, where: str, record: TensorRecord | None) -> None:
        """Make sure that it lies in its tensor; ``record`` is None for what is in no list of tensors."""
        for part in (self.tensor, self.flat, self.place):
            if part is not None:
                is_pairs = _are_counts(part) and len(part) % 2 == 0
                check(is_pairs, where, part)
        if record is None:
            return
        if self.tensor is not None:
            _check_runs(where, self.tensor, record)
        # Whether it ends inside the slice is checked together with the other pieces of the slice.
        if self.flat is not None:
            is_range = len(self.flat) == 2 and self.flat[0] <= self.flat[1]
            check(is_range, where, self.flat)
        check(self.place is None or len(self.place) == 2, where, self.place)


@dataclass
class OptimizerRecord:
    """The optimizer of a checkpoint.

    Attributes:
        groups: settings of each parameter group that JSON can represent, and ``"params"``: global names.
        states: keys of its state that have the shape of the parameter, such as ``"exp_avg"``.
    """

    type: str
    groups: list[dict[str, Any]] = field(default_factory=list)
    states: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Make sure that it can be."""
        check_text(self.type, "optimizer.type")
        check(are_texts(self.states), "optimizer.states", self.states)
        check(isinstance(self.groups, list), "optimizer.groups", self.groups)
        for group in self.groups:
            check(isinstance(group, dict) and are_texts(group.get("params")), "optimizer.groups", group)


# -- checks ------------------------------------------------------------------------------------------------------------


def check(holds: bool, where: str, value: object) -> None:
    """Raise ValueError with ``where`` and ``value`` unless ``holds`` is true."""
    if not holds:
        raise ValueError(f"{where} cannot be {repr(value)[:80]}")


def check_text(value: object, where: str) -> None:
    """Make sure that it is a text."""
    check(isinstance(value, str), where, value)


def check_count(value: object, where: str) -> None:
    """Make sure that it is a number of things."""
    check(_is_count(value), where, value)


def are_texts(values: object) -> bool:
    """Return whether ``values`` is a list or tuple of strings."""
    if not isinstance(values, list | tuple):
        return False
    return all(isinstance(value, str) for value in values)


def _check_runs(where: str, cuts: tuple[int, ...], record: TensorRecord) -> None:
    """Make sure that the runs of a slice lie in their tensor."""
    axis = record.tensor_axis
    check(axis is not None, where, cuts)
    length = record.shape[axis or 0]
    runs = zip(cuts[::2], cuts[1::2], strict=True)
    check(all(start <= stop <= length for start, stop in runs), where, cuts)


def _product(shape: Iterable[int]) -> int:
    """Return the product of the sizes, with 1 for 0: the layout of an empty tensor counts as well."""
    return math.prod(max(size, 1) for size in shape)


def _is_count(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return 0 <= value < 2**62


def _are_counts(values: object) -> bool:
    if not isinstance(values, tuple):
        return False
    return all(_is_count(value) for value in values)
