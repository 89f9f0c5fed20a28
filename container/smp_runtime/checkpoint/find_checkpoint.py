"""Which checkpoint to resume from: the same on every rank, whole, and undamaged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    not_comparable,
    verify,
)
from smp_runtime.checkpoint.files.opened_files import CheckpointFiles, ReplacedError
from smp_runtime.checkpoint.files.verification import find_uncovered
from smp_runtime.checkpoint.rank_agreement import met_by
from smp_runtime.comm.control import host_name
from smp_runtime.errors import CheckpointError

if TYPE_CHECKING:
    from smp_runtime.job.session import Session

logger = logging.getLogger("smp")


@dataclass(frozen=True)
class Needed:
    """What a rank needs of a checkpoint.

    Attributes:
        files: the opened folder; what is verified here is what is read later.
        names: of files; None for all.
    """

    files: CheckpointFiles
    names: set[str] | None


#: Raises when the checkpoint does not fit the rank's model.
Needs = Callable[[FoundCheckpoint], Needed]

#: A checkpoint on any host: its name, and which save it is.
_Key = tuple[str, "str | None"]
#: How often it is looked again for checkpoints that another job has replaced meanwhile.
_LOOKS = 10
#: In place of a save: hosts have the name in common, but no save of it.
_DIFFERENT = "different"


def find_checkpoint(session: Session, path: Path, tag: str | None, needs: Needs) -> FoundCheckpoint:
    """Return the checkpoint that every rank has complete and undamaged; all ranks call it.

    Args:
        tag: a tag or a folder name; None means the newest, or the last complete one before it.

    Raises:
        CheckpointError: on every rank: there is none, it is damaged, or it belongs to another model.
    """
    for _ in range(_LOOKS):
        found = _find(session, path, tag, needs, _look(session, path))
        if found is not None:
            return found
    raise CheckpointError(
        f"another job saves into {path} faster than its checkpoints can be read: {_LOOKS} times one was replaced meanwhile; resume "
        "when that job has ended, or with the tag of a checkpoint that it leaves alone"
    )


def _find(session: Session, path: Path, tag: str | None, needs: Needs, seen: _FolderContents) -> FoundCheckpoint | None:
    """Return the checkpoint to use among those in ``seen``; None if the folder has changed since.

    Raises as :func:`find_checkpoint`.
    """
    candidates = _candidates(seen.listed, set(seen.pointed), tag)
    if not candidates:
        if _has_changed(session, path, seen):
            return None
        raise _nothing(path, tag, [list(dict(view)) for view in seen.listed], seen.pointed[0])
    refused: list[str] = []
    for name, save in candidates:
        is_common = save != _DIFFERENT
        problems = _problems(session, seen.found[name, save], needs) if is_common else _different(session, name, seen)
        if not problems:
            chosen = seen.found[name, save]
            _warn(session, path / name, chosen, refused, seen if tag is None else None)
            return chosen
        if _has_changed(session, path, seen):
            return None
        refused.append(f"the checkpoint {path / name} is not whole: {', '.join(problems)}")
        if tag is not None:
            raise CheckpointError(f"{refused[0]}; {_previous(_other_whole(seen, name))}")
    raise CheckpointError(f"{'; '.join(refused)}; {_previous([])}")


def _other_whole(seen: _FolderContents, refused: str) -> list[str]:
    """Return the names of whole checkpoints here that all hosts have, except for a refused one."""
    views = [dict(view) for view in seen.listed]
    found: dict[str, None] = {}
    for checkpoint in reversed(seen.found.values()):
        name = checkpoint.name
        is_on_all = all(name in view for view in views)
        if name != refused and is_on_all and checkpoint.is_whole:
            found[name] = None
    return list(found)


def _different(session: Session, name: str, seen: _FolderContents) -> list[str]:
    """Return the reasons why hosts have no save of a checkpoint in common; all ranks call it."""
    here: list[str] = []
    for checkpoint in seen.found.values():
        if checkpoint.name == name and checkpoint.manifest is None:
            here += checkpoint.problems
    control = session.ranks.control
    # Each host sees its own folder only, and every rank must raise the same error.
    found = _merged(control.allgather(here, list(range(control.size))))
    return found or ["hosts have different saves of it"]


def _warn(
    session: Session, wanted: Path, chosen: FoundCheckpoint, refused: Sequence[str], seen: _FolderContents | None
) -> None:
    """Log a warning if the resumed checkpoint is not the expected one.

    With ``seen``, also log if ``newest`` names a checkpoint although others were saved later.
    """
    ranks = session.ranks
    if refused and ranks.rank == 0:
        logger.warning("%s; resuming from %s instead", "; ".join(refused), chosen.folder)
        return
    is_replaced = chosen.is_former and ranks.local_rank == 0 and chosen.folder.with_name(chosen.name).exists()
    if is_replaced:
        logger.warning("%s is not the same on all hosts; resuming from %s", wanted, chosen.folder)
        return
    if seen is None or ranks.rank != 0:
        return
    later = _saved_later(chosen, seen)
    if later:
        logger.warning(
            "resuming from %s, which the file %s names, though %s was saved later; pass tag= to choose",
            chosen.folder,
            NEWEST,
            ", ".join(later),
        )


def _saved_later(chosen: FoundCheckpoint, seen: _FolderContents) -> list[str]:
    """Return the names of whole checkpoints that were saved after the chosen one."""
    names = []
    saved = _time_of(chosen)
    for other in seen.found.values():
        # A former save is one that a later save of the same name has replaced.
        is_choice = other.is_whole and not other.is_former
        if is_choice and _time_of(other) > saved:
            names.append(other.name)
    return names


def _time_of(checkpoint: FoundCheckpoint) -> float:
    return 0.0 if checkpoint.manifest is None else checkpoint.manifest.saved


def _has_changed(session: Session, path: Path, seen: _FolderContents) -> bool:
    """Return whether another job has saved in the meantime; all ranks call it.

    Then a checkpoint that looks damaged may only have been replaced.
    """
    now = _look(session, path)
    return (now.listed, now.pointed) != (seen.listed, seen.pointed)


@dataclass(frozen=True)
class _FolderContents:
    """The contents of a folder as the ranks see them.

    Attributes:
        found: by name and save.
        listed: by rank, its checkpoints, newest first.
        pointed: by rank, the name in its file ``newest``.
    """

    found: dict[_Key, FoundCheckpoint]
    listed: list[list[_Key]]
    pointed: list[str | None]


def _look(session: Session, path: Path) -> _FolderContents:
    """Return the folder's contents now; all ranks call it."""
    found: dict[_Key, FoundCheckpoint] = {}
    failure = None
    try:
        found = {(c.name, c.save): c for c in reversed(checkpoints_in(path, formers=True))}
    except Exception as error:  # report any error, because the other ranks wait for the outcome
        failure = f"{type(error).__name__}: {error}"
    mine = ([*reversed(found)], newest_name(path), failure, host_name())
    views = session.ranks.control.allgather(mine, list(range(session.ranks.control.size)))
    for rank, (_, _, why, host) in enumerate(views):
        if why:
            raise met_by(f"rank {rank} cannot look for checkpoints in {path} ({why}); check the path", rank, host)
    return _FolderContents(found, [listed for listed, *_ in views], [pointed for _, pointed, *_ in views])


def _candidates(listed: Sequence[Sequence[_Key]], pointed: set[str | None], tag: str | None) -> list[_Key]:
    """Return the checkpoints that every host has, in the order to try them; the same on every rank.

    Args:
        listed: by rank, its checkpoints, newest first.
        pointed: the names in ``newest`` on all hosts.
        tag: the wanted one, or None.

    Returns:
        Name and save. If hosts have a name in common but no save of it, the save is :data:`_DIFFERENT`.
    """
    common = _on_all_hosts(listed)
    agreed = {name for name, save in common if save != _DIFFERENT}
    common = [(name, save) for name, save in common if save != _DIFFERENT or name not in agreed]
    if tag is not None:
        return _named(common, tag)
    # Newest first, but never past what ``newest`` names: that one was the last to be complete. Hosts that were stopped
    # between one host's publishing and another's do not agree about it.
    first = [key for key in common if pointed == {key[0]}][:1]
    return first + [key for key in common if key not in first]


def _on_all_hosts(listed: Sequence[Sequence[_Key]]) -> list[_Key]:
    common: list[_Key] = []
    for name, save in listed[0]:
        is_on_all = all((name, save) in view for view in listed)
        has_name_on_all = all(name in dict(view) for view in listed)
        # A job that was stopped while it published leaves hosts with different saves of one name.
        different = (name, _DIFFERENT)
        if is_on_all:
            common.append((name, save))
        elif has_name_on_all and different not in common:
            common.append(different)
    return common


def _named(keys: Sequence[_Key], tag: str) -> list[_Key]:
    """Return the first checkpoint with a tag, or else with the name of its folder."""
    for wanted in (tag, f"{tag}{PARTIAL}"):
        for key in keys:
            if key[0] == wanted:
                return [key]
    return []


def _problems(session: Session, checkpoint: FoundCheckpoint, needs: Needs) -> list[str]:
    """Return descriptions of a checkpoint's problems on any rank; the ranks of a host divide the files among them."""
    everyone = list(range(session.ranks.control.size))
    wanted: list[str] | None = None
    opened: CheckpointFiles | None = None
    refusal: str | None = None
    failure: Exception | None = None
    problems: list[str] = []
    manifest = checkpoint.manifest
    if manifest is None:
        problems = list(checkpoint.problems)
    else:
        try:
            # A manifest that contradicts itself is damage, and no sign of another model.
            problems = find_uncovered(manifest)
            if not problems:
                needed = needs(checkpoint)
                opened, names = needed.files, needed.names
                wanted = sorted(manifest.files if names is None else names)
                problems = missing_files(opened, manifest, wanted)
        except ReplacedError as error:
            problems = [str(error)]
        except CheckpointError as error:
            refusal = str(error)
        except Exception as error:  # report any error, because the other ranks wait for the outcome
            failure, refusal = error, f"{type(error).__name__}: {error}"
    views = session.ranks.control.allgather((host_name(), wanted, problems, refusal), everyone)
    refusals = [(why, rank, host) for rank, (host, _, _, why) in enumerate(views) if why]
    if failure is not None:
        raise failure
    if refusals:
        raise met_by(*refusals[0])
    said = _merged([found for _, _, found, _ in views])
    if said or manifest is None or opened is None:
        return said
    here = sorted({name for host, names, _, _ in views if host == host_name() for name in names or ()})
    mine = _share(manifest, here, session.ranks.local_rank, session.ranks.local_size)
    problems = _compared(opened, manifest, mine, session.ranks.rank)
    return _merged(session.ranks.control.allgather(problems, everyone))


def _compared(files: CheckpointFiles, manifest: Manifest, names: Sequence[str], rank: int) -> list[str]:
    """Compare files with their checksums and return descriptions of the problems; never raise, since other ranks wait."""
    if (unread := not_comparable(manifest, names)) is not None:
        logger.warning("[rank %d] %s: %s", rank, files.folder, unread)
    try:
        return verify(files, manifest, names)
    except Exception as error:
        return [f"it cannot be read ({type(error).__name__}: {error})"]


def _share(manifest: Manifest, files: Sequence[str], index: int, count: int) -> list[str]:
    """Return the files that this rank verifies, so that all ranks of a host read about the same number of bytes."""
    loads = [0] * count
    mine = []
    for name in sorted(files, key=lambda name: (-manifest.files[name].bytes, name)):
        least = loads.index(min(loads))
        loads[least] += manifest.files[name].bytes
        if least == index:
            mine.append(name)
    return mine


def _merged(lists: Sequence[Sequence[str]]) -> list[str]:
    merged: dict[str, None] = {}
    for found in lists:
        merged.update(dict.fromkeys(found))
    return list(merged)


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
