"""All that can be said about a checkpoint folder without its job: files, checksums, pieces, and what is in them."""

from __future__ import annotations

from collections.abc import Iterator

from smp_runtime.checkpoint.files.coverage import uncovered
from smp_runtime.checkpoint.files.manifest import MASTER, MODULE, FoundCheckpoint, verify
from smp_runtime.checkpoint.files.reader import CheckpointReader
from smp_runtime.errors import CheckpointError


def problems_of(found: FoundCheckpoint) -> list[str]:
    """What is wrong with a checkpoint, in words, after reading it to its end; empty if nothing is."""
    if found.manifest is None:
        return list(found.problems)
    problems = verify(found.folder, found.manifest)
    problems += uncovered(found.manifest)
    if not problems:  # files that are damaged cannot be opened, and have been named
        problems += _unreadable(CheckpointReader(found.folder, found.manifest))
    return problems


def _unreadable(reader: CheckpointReader) -> Iterator[str]:
    """Tensors that the files do not give as the manifest says, each put together once and dropped again."""
    manifest = reader.manifest
    for name in (*manifest.parameters, *manifest.buffers):
        for key in (MODULE, MASTER, *reader.states_of(name)):
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
