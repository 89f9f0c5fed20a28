"""Whether the pieces of a checkpoint make up every tensor exactly once. Pure arithmetic on the manifest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from smp_runtime.checkpoint.files.manifest import MASTER, MODULE, Manifest, Piece, TensorRecord

Range = tuple[int, int]


def slice_elements(record: TensorRecord, part: Range | None) -> int:
    """Elements of a tensor parallel slice; of the whole tensor without one."""
    return math.prod(slice_shape(record, part))


def slice_shape(record: TensorRecord, part: Range | None) -> tuple[int, ...]:
    """Shape of a tensor parallel slice; of the whole tensor without one."""
    if part is None or record.tensor_axis is None:
        return record.shape
    return tuple(part[1] - part[0] if axis == record.tensor_axis else n for axis, n in enumerate(record.shape))


def uncovered(manifest: Manifest) -> list[str]:
    """What is missing or twice there, in words; empty if every weight and every optimizer state is there once.

    A weight may be there as the model has it, in float32, or as both, but each of these whole. A state of the optimizer
    may be absent for a parameter that it has never updated, but not in part.
    """
    problems: list[str] = []
    states = manifest.optimizer.states if manifest.optimizer is not None else []
    for name, record in (*manifest.parameters.items(), *manifest.buffers.items()):
        found = {key: list(manifest.holders(key, name)) for key in (MODULE, MASTER, *states)}
        if not found[MODULE] and not found[MASTER]:
            problems.append(f"no file has the weight {name}")
        for key, holders in found.items():
            what = f"the {'weight' if key == MODULE else 'float32 weight' if key == MASTER else f'state {key!r}'} of {name}"
            pieces = [piece for _, piece in holders if not piece.whole_object]
            if pieces:
                files = ", ".join(sorted({file for file, _ in holders}))
                problems += [f"{what} {problem} (pieces in {files})" for problem in _of_one(record, pieces)]
    names = set(manifest.parameters) | set(manifest.buffers)
    for file, keys in manifest.pieces.items():
        if file not in manifest.files:
            problems.append(f"pieces are said to be in {file}, which is no file of the checkpoint")
        for key, found_pieces in keys.items():
            strangers = (name for name, piece in found_pieces.items() if name not in names and not piece.whole_object)
            problems += [f"{file} has {key!r} of {name}, which is no tensor of the model" for name in strangers]
    return problems


def _of_one(record: TensorRecord, pieces: Sequence[Piece]) -> Iterator[str]:
    slices: dict[Range | None, list[Piece]] = {}
    for piece in pieces:
        slices.setdefault(piece.tensor, []).append(piece)
    if set(slices) != {None}:
        if None in slices or record.tensor_axis is None:
            yield "is there both whole and in slices"
            return
        yield from _tiles(
            (part for part in slices if part is not None),
            record.shape[record.tensor_axis],
            f"rows of dim {record.tensor_axis}",
        )
    for part, found in slices.items():
        size = slice_elements(record, part)
        where = "elements" if part is None else f"elements of slice {part[0]}–{part[1]}"
        if not size and all(piece.flat in (None, (0, 0)) for piece in found):
            continue
        yield from _tiles((piece.flat or (0, size) for piece in found), size, where)


def _tiles(ranges: Iterable[Range], size: int, what: str) -> Iterator[str]:
    """What keeps ranges from making up ``0 … size`` exactly once."""
    reached = 0
    for start, stop in sorted(r for r in ranges if r[0] != r[1]):
        if start > reached:
            yield f"lacks {what} {reached:,} to {start:,} of {size:,}"
        elif start < reached:
            yield f"has {what} {start:,} to {min(reached, stop):,} of {size:,} twice"
        reached = max(reached, stop)
    if reached < size:
        yield f"lacks {what} {reached:,} to {size:,} of {size:,}"
    elif reached > size:
        yield f"has {what} up to {reached:,}, but there are {size:,}"
