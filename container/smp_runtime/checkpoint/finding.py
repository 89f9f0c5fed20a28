"""Which checkpoint to resume from: the same on every rank, whole, and undamaged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from smp_runtime.checkpoint.manifest import (
    NEWEST,
    PARTIAL,
    FoundCheckpoint,
    Manifest,
    checkpoints_in,
    missing_files,
    newest_name,
    verify,
)
from smp_runtime.errors import CheckpointError
from smp_runtime.session import Session, host_name

logger = logging.getLogger("smp")

#: The files that a rank needs of a checkpoint, or None for all; raises when the checkpoint does not fit its model.
Needs = Callable[[FoundCheckpoint], "set[str] | None"]


def find_checkpoint(session: Session, path: Path, tag: str | None, needs: Needs) -> FoundCheckpoint:
    """The checkpoint that every rank has whole and undamaged; all ranks call it.

    Args:
        path: folder of checkpoints.
        tag: a tag or a folder name; None means the newest, or the last whole one before it.
        needs: what this rank reads of a checkpoint.

    Raises:
        CheckpointError: on every rank: there is none, it is damaged, or it belongs to another model.
    """
    everyone = list(range(session.control.size))
    found = checkpoints_in(path)
    by_name = {checkpoint.name: checkpoint for checkpoint in found}
    pointed = newest_name(path)
    views = session.control.allgather(([c.name for c in found], pointed), everyone)
    common = [name for name in views[0][0] if all(name in names for names, _ in views)]
    newest = views[0][1]
    if tag is not None:
        candidates = [name for name in (tag, f"{tag}{PARTIAL}") if name in common][:1]
    else:
        # Newest first, but never past what ``newest`` names: that one was the last to be complete.
        candidates = [name for name in ([newest] if newest in common else []) if name]
        candidates += [name for name in common if name not in candidates]
    if not candidates:
        raise _nothing(path, tag, [names for names, _ in views], newest)
    refused: list[str] = []
    for name in candidates:
        problems = _problems(session, by_name[name], needs)
        if not problems:
            if refused and session.rank == 0:
                logger.warning("%s; resuming from %s instead", "; ".join(refused), path / name)
            return by_name[name]
        refused.append(f"the checkpoint {path / name} is not whole: {', '.join(problems)}")
        if tag is not None:
            others = [c for c in common if c != name and by_name[c].is_whole]
            raise CheckpointError(f"{refused[0]}; {_previous(others)}")
    raise CheckpointError(f"{'; '.join(refused)}; {_previous([])}")


def _problems(session: Session, checkpoint: FoundCheckpoint, needs: Needs) -> list[str]:
    """What is wrong with a checkpoint on any rank; its host's ranks share the reading of the files out among them."""
    everyone = list(range(session.control.size))
    wanted: list[str] | None = None
    refusal: str | None = None
    problems: list[str] = []
    manifest = checkpoint.manifest
    if manifest is None:
        problems = list(checkpoint.problems)
    else:
        try:
            files = needs(checkpoint)
            wanted = sorted(manifest.files if files is None else files)
            problems = missing_files(checkpoint.folder, manifest, wanted)
        except CheckpointError as error:
            refusal = str(error)
    views = session.control.allgather((host_name(), wanted, problems, refusal), everyone)
    refusals = [why for _, _, _, why in views if why]
    if refusals:
        raise CheckpointError(refusals[0])
    said = _merged([found for _, _, found, _ in views])
    if said or manifest is None:
        return said
    here = sorted({name for host, names, _, _ in views if host == host_name() for name in names or ()})
    mine = _share(manifest, here, session.local_rank, session.local_size)
    return _merged(session.control.allgather(verify(checkpoint.folder, manifest, mine), everyone))


def _share(manifest: Manifest, files: Sequence[str], index: int, count: int) -> list[str]:
    """This rank's files to verify, so that all of a host's ranks read about as much."""
    loads = [0] * count
    mine = []
    for name in sorted(files, key=lambda name: (-manifest.files[name].bytes, name)):
        least = loads.index(min(loads))
        loads[least] += manifest.files[name].bytes
        if least == index:
            mine.append(name)
    return mine


def _merged(lists: Sequence[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(problem for found in lists for problem in found))


def _previous(names: Sequence[str]) -> str:
    if not names:
        return "there is no other whole checkpoint: train from the start, or copy one that is whole"
    return f"resume from another one with tag={names[0]!r}" + (f" (or {', '.join(names[1:])})" if names[1:] else "")


def _nothing(path: Path, tag: str | None, names: Sequence[Sequence[str]], newest: str | None) -> CheckpointError:
    if tag is not None:
        return CheckpointError(
            f"there is no partial checkpoint {tag!r} in {path}; it holds {', '.join(sorted(names[0])) or 'none'}: use one "
            "of these tags"
        )
    if any(names):
        return CheckpointError(f"the ranks have no checkpoint in common in {path}: {[list(found) for found in names]}")
    what = f"the file {NEWEST!r} is missing" if newest is None else f"{newest!r}, which {NEWEST!r} names, is not there"
    return CheckpointError(
        f"there is no checkpoint to resume in {path}: {what}; check the path, or train from the start"
    )
