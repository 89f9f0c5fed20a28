"""Which checkpoint to resume from: the same on every rank, whole, and undamaged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smp_runtime.checkpoint.files.manifest import (
    NEWEST,
    PARTIAL,
    FoundCheckpoint,
    Manifest,
    checkpoints_in,
    missing_files,
    newest_name,
    verify,
)
from smp_runtime.comm.control import host_name
from smp_runtime.errors import CheckpointError

if TYPE_CHECKING:
    from smp_runtime.job.session import Session

logger = logging.getLogger("smp")

#: The files that a rank needs of a checkpoint, or None for all; raises when the checkpoint does not fit its model.
Needs = Callable[[FoundCheckpoint], "set[str] | None"]

#: A checkpoint on any host: its name, and which save it is.
_Key = tuple[str, "str | None"]
#: In place of a save: hosts have the name in common, but no save of it.
_DIFFERENT = "different"


def find_checkpoint(session: Session, path: Path, tag: str | None, needs: Needs) -> FoundCheckpoint:
    """The checkpoint that every rank has whole and undamaged; all ranks call it.

    Args:
        tag: a tag or a folder name; None means the newest, or the last whole one before it.

    Raises:
        CheckpointError: on every rank: there is none, it is damaged, or it belongs to another model.
    """
    everyone = list(range(session.ranks.control.size))
    found, listed, pointed = _look(session, path)
    names = [name for name, _ in listed[0] if all(name in dict(view) for view in listed)]
    candidates = _candidates(listed, set(pointed), tag)
    if not candidates:
        raise _nothing(path, tag, [list(dict(view)) for view in listed], pointed[0])
    refused: list[str] = []
    for name, save in candidates:
        if save == _DIFFERENT:
            here = [c for c in found.values() if c.name == name and c.manifest is None]
            problems = _merged(session.ranks.control.allgather([why for c in here for why in c.problems], everyone))
            problems = problems or ["hosts have different saves of it"]
        else:
            problems = _problems(session, found[name, save], needs)
        if not problems:
            chosen = found[name, save]
            if refused and session.ranks.rank == 0:
                logger.warning("%s; resuming from %s instead", "; ".join(refused), chosen.folder)
            elif chosen.is_former and chosen.folder.with_name(name).exists() and session.ranks.local_rank == 0:
                logger.warning("%s is not the same on all hosts; resuming from %s", path / name, chosen.folder)
            return chosen
        refused.append(f"the checkpoint {path / name} is not whole: {', '.join(problems)}")
        if tag is not None:
            others = [c.name for c in reversed(found.values()) if c.name != name and c.name in names and c.is_whole]
            raise CheckpointError(f"{refused[0]}; {_previous(list(dict.fromkeys(others)))}")
    raise CheckpointError(f"{'; '.join(refused)}; {_previous([])}")


def _look(session: Session, path: Path) -> tuple[dict[_Key, FoundCheckpoint], list[list[_Key]], list[str | None]]:
    """What this rank finds in a folder; by rank, what there is, the newest first; and what ``newest`` names there."""
    found: dict[_Key, FoundCheckpoint] = {}
    failure = None
    try:
        found = {(c.name, c.save): c for c in reversed(checkpoints_in(path, formers=True))}
    except Exception as error:  # whatever it is, the other ranks wait to be told
        failure = f"{type(error).__name__}: {error}"
    mine = ([*reversed(found)], newest_name(path), failure)
    views = session.ranks.control.allgather(mine, list(range(session.ranks.control.size)))
    for rank, (_, _, why) in enumerate(views):
        if why:
            raise CheckpointError(f"rank {rank} cannot look for checkpoints in {path} ({why}); check the path")
    return found, [listed for listed, _, _ in views], [pointed for _, pointed, _ in views]


def _candidates(listed: Sequence[Sequence[_Key]], pointed: set[str | None], tag: str | None) -> list[_Key]:
    """What every host has, by name and save, in the order in which it is tried; the same on every rank.

    Args:
        listed: by rank, what there is, the newest first.
        pointed: what ``newest`` names on any host.
        tag: the wanted one, or None.

    Returns:
        Where hosts have a name in common but no save of it, the save is :data:`_DIFFERENT`.
    """
    common: list[_Key] = []
    for name, save in listed[0]:
        if all((name, save) in view for view in listed):
            common.append((name, save))
        elif all(name in dict(view) for view in listed) and (name, _DIFFERENT) not in common:
            common.append((name, _DIFFERENT))
    agreed = {name for name, save in common if save != _DIFFERENT}
    common = [(name, save) for name, save in common if save != _DIFFERENT or name not in agreed]
    if tag is not None:
        wanted = [name for name in (tag, f"{tag}{PARTIAL}") if name in dict(common)][:1]
        return [key for key in common if key[0] in wanted][:1]
    # Newest first, but never past what ``newest`` names: that one was the last to be complete. Hosts that were stopped
    # between one host's publishing and another's do not agree about it.
    first = [key for key in common if pointed == {key[0]}][:1]
    return first + [key for key in common if key not in first]


def _problems(session: Session, checkpoint: FoundCheckpoint, needs: Needs) -> list[str]:
    """What is wrong with a checkpoint on any rank; its host's ranks share the reading of the files out among them."""
    everyone = list(range(session.ranks.control.size))
    wanted: list[str] | None = None
    refusal: str | None = None
    failure: Exception | None = None
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
        except Exception as error:  # whatever it is, the other ranks wait to be told
            failure, refusal = error, f"{type(error).__name__}: {error}"
    views = session.ranks.control.allgather((host_name(), wanted, problems, refusal), everyone)
    refusals = [why for _, _, _, why in views if why]
    if failure is not None:
        raise failure
    if refusals:
        raise CheckpointError(refusals[0])
    said = _merged([found for _, _, found, _ in views])
    if said or manifest is None:
        return said
    here = sorted({name for host, names, _, _ in views if host == host_name() for name in names or ()})
    mine = _share(manifest, here, session.ranks.local_rank, session.ranks.local_size)
    try:
        problems = verify(checkpoint.folder, manifest, mine)
    except OSError as error:
        problems = [f"it cannot be read ({error})"]
    return _merged(session.ranks.control.allgather(problems, everyone))


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
