"""Checks of a checkpoint folder that need no job: files, checksums, pieces and their contents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from smp_runtime.checkpoint.files.manifest import (
    EXTRA,
    MASTER,
    MODULE,
    FoundCheckpoint,
    Manifest,
    Piece,
    TensorRecord,
    not_comparable,
    verify,
)
from smp_runtime.checkpoint.files.reader import CheckpointReader
from smp_runtime.checkpoint.files.tensor_regions import TensorRegion
from smp_runtime.errors import CheckpointError
from smp_runtime.parameters.registry import intervals

Range = tuple[int, int]


def problems_of(found: FoundCheckpoint) -> list[str]:
    """Read a checkpoint to its end and return descriptions of its problems; empty if there are none."""
    if found.manifest is None:
        return list(found.problems)
    reader = CheckpointReader(found.folder, found.manifest, found.identity)
    try:
        problems = verify(reader.files, found.manifest)
        if (unread := not_comparable(found.manifest)) is not None:
            problems.append(unread)
        problems += find_uncovered(found.manifest)
        if not problems:  # files that are damaged cannot be opened, and have been named
            problems += _unreadable(reader)
    except CheckpointError as error:
        return [str(error)]
    return problems


def _unreadable(reader: CheckpointReader) -> Iterator[str]:
    """Yield descriptions of tensors that cannot be read as in the manifest; each is assembled once, then freed."""
    manifest, states = reader.manifest, reader.state_keys()
    for name in (*manifest.parameters, *manifest.buffers):
        for key in (MODULE, MASTER, *sorted(states.get(name, ()))):
            if not reader.holds(key, name):
                continue
            try:
                if reader.is_object(key, name):
                    reader.object(key, name)
                else:
                    reader.whole(key, name)
            except (CheckpointError, KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
                files = ", ".join(reader.files_with(key, name))
                why = f"lacks {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
                yield f"{key!r} of {name} cannot be read from {files}, though the checksums agree: {why}"


def find_uncovered(manifest: Manifest) -> list[str]:
    """Return descriptions of missing or duplicate parts; empty if each weight and state is there exactly once.

    A weight may exist in the model's type, in float32, or in both, but each of these must be complete. An
    optimizer state may be absent for a parameter that was never updated, but not in part.
    """
    states = manifest.optimizer.states if manifest.optimizer is not None else []
    return [*_uncovered_tensors(manifest, states), *_strange_pieces(manifest, states)]


def _uncovered_tensors(manifest: Manifest, states: Sequence[str]) -> Iterator[str]:
    """Yield descriptions of tensors with missing or duplicate parts."""
    holders = _holders(manifest)
    titles = {MODULE: "weight", MASTER: "float32 weight"}
    tensors = [*manifest.parameters.items(), *manifest.buffers.items()]
    for name, record in tensors:
        found = {key: holders.get((key, name), []) for key in (MODULE, MASTER, *states)}
        has_weight = bool(found[MODULE] or found[MASTER])
        if not has_weight:
            yield f"no file has the weight {name}"
        for key, held in found.items():
            title = titles.get(key, f"state {key!r}")
            pieces = [piece for _, piece in held if not piece.whole_object]
            if not pieces:
                continue
            files = sorted({file for file, _ in held})
            for problem in _of_one(record, pieces):
                yield f"the {title} of {name} {problem} (pieces in {', '.join(files)})"


def _holders(manifest: Manifest) -> dict[tuple[str, str], list[tuple[str, Piece]]]:
    """Return the files with their pieces of each tensor, by key and name."""
    holders: dict[tuple[str, str], list[tuple[str, Piece]]] = {}
    for file, keys in manifest.pieces.items():
        for key, pieces in keys.items():
            for name, piece in pieces.items():
                holders.setdefault((key, name), []).append((file, piece))
    return holders


def _strange_pieces(manifest: Manifest, states: Sequence[str]) -> Iterator[str]:
    """Yield descriptions of pieces that belong to no tensor, or that do not fit into their files."""
    names = {*manifest.parameters, *manifest.buffers}
    known = {MODULE, MASTER, EXTRA, *states}
    for file, keys in manifest.pieces.items():
        is_listed = file in manifest.files
        if not is_listed:
            yield f"pieces are said to be in {file}, which is no file of the checkpoint"
        claimed = 0
        for key, found in keys.items():
            tensors = [name for name, piece in found.items() if not piece.whole_object]
            is_unknown = key not in known
            if is_unknown and tensors:
                yield f"{file} has the state {key!r}, which the optimizer does not have"
            for name in tensors:
                claimed += _claimed(manifest, name, found[name])
                if name not in names:
                    yield f"{file} has {key!r} of {name}, which is no tensor of the model"
        if is_listed and claimed > manifest.files[file].bytes:
            yield f"{file} is said to have {claimed:,} elements in {manifest.files[file].bytes:,} bytes"


def _claimed(manifest: Manifest, name: str, piece: Piece) -> int:
    """Return the number of elements of a piece; each takes at least one byte in a file.

    This keeps a wrong manifest from making a reader allocate more memory than a file can fill.
    """
    record = manifest.parameters.get(name) or manifest.buffers.get(name)
    if record is None or piece.whole_object:
        return 0
    return TensorRegion.of_piece(record, piece).elements


def _of_one(record: TensorRecord, pieces: Sequence[Piece]) -> Iterator[str]:
    slices: dict[tuple[int, ...] | None, list[Piece]] = {}
    for piece in pieces:
        slices.setdefault(piece.tensor, []).append(piece)
    cuts = [part for part in slices if part is not None]
    if cuts:
        axis = record.tensor_axis
        if None in slices or axis is None:
            yield "is there both whole and in slices"
            return
        runs: list[tuple[int, int]] = []
        for cut in cuts:
            runs += intervals(cut)
        yield from _tiles(runs, record.shape[axis], f"rows of dim {axis}")
    for part, found in slices.items():
        yield from _uncovered_elements(record, part, found)


def _uncovered_elements(record: TensorRecord, part: tuple[int, ...] | None, pieces: Sequence[Piece]) -> Iterator[str]:
    """Yield descriptions of elements of one slice that no piece has, or several."""
    region = TensorRegion.of(record.shape, record.tensor_axis, part)
    size = region.slice_elements
    # An empty slice may have several pieces, all of them empty.
    are_empty = all(piece.flat in (None, (0, 0)) for piece in pieces)
    if not size and are_empty:
        return
    ranges = [piece.flat or (0, size) for piece in pieces]
    yield from _tiles(ranges, size, _title(part or ()))


def _title(part: tuple[int, ...]) -> str:
    runs = [f"{start}–{stop}" for start, stop in intervals(part)]
    return f"elements of slice {' and '.join(runs)}" if runs else "elements"


def _tiles(ranges: Iterable[Range], size: int, what: str) -> Iterator[str]:
    """Yield the gaps and overlaps that keep ranges from covering ``0 … size`` exactly once."""
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
