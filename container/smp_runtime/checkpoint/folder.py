"""A checkpoint folder: written aside, renamed when every rank is done, named in ``newest`` last."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from smp_runtime.checkpoint.files import write_text
from smp_runtime.errors import CheckpointError
from smp_runtime.session import Session

NEWEST = "newest"
PARTIAL = "_partial"


class FolderTransaction:
    """Makes a folder appear whole: all ranks enter, write into :attr:`writing`, and commit together.

    Works on a folder that all hosts share and on one that each host has of its own: the first rank leaves a token
    in the folder, and the first rank of a host that does not see it knows that it must keep its own folder in order.

    Args:
        session: all its ranks take part.
        final: where the folder shall appear.
    """

    def __init__(self, session: Session, final: Path) -> None:
        self._session = session
        self._everyone = list(range(session.control.size))
        self._final = final
        self.writing = final.with_name(f".{final.name}.tmp")
        leads = session.rank == 0
        token = f"{random.SystemRandom().getrandbits(64):016x}" if leads else None
        if leads:
            self._restart(str(token))
        token = session.control.broadcast(token, self._everyone)
        self._keeps_order = leads
        if not leads and session.local_rank == 0 and not self._has_token(token):
            self._restart(token)
            self._keeps_order = True
        session.control.barrier(self._everyone)

    def commit(self, failure: str | None) -> None:
        """Rename the folder and point ``newest`` at it, if no rank has failed.

        Args:
            failure: why this rank could not write its files, or None.

        Raises:
            CheckpointError: on every rank, when any rank failed; the former checkpoint stays the newest.
        """
        try:
            refuse_if_any_failed(self._session, failure, self._final)
        except CheckpointError:
            if self._keeps_order:
                shutil.rmtree(self.writing, ignore_errors=True)
            raise
        if self._keeps_order:
            self._token.unlink(missing_ok=True)
            former = self._final.with_name(f".{self._final.name}.old")
            shutil.rmtree(former, ignore_errors=True)
            if self._final.exists():
                self._final.rename(former)
            self.writing.rename(self._final)
            write_text(self._final.name, self._final.parent / NEWEST)
            shutil.rmtree(former, ignore_errors=True)
        self._session.control.barrier(self._everyone)

    @property
    def keeps_order(self) -> bool:
        """Whether this rank creates and removes folders for its host."""
        return self._keeps_order

    @property
    def _token(self) -> Path:
        return self.writing / ".token"

    def _restart(self, token: str) -> None:
        shutil.rmtree(self.writing, ignore_errors=True)
        self.writing.mkdir(parents=True)
        self._token.write_text(token)

    def _has_token(self, token: str) -> bool:
        return self._token.is_file() and self._token.read_text() == token


def refuse_if_any_failed(session: Session, failure: str | None, final: Path) -> None:
    """Raise on every rank when any rank could not write its part; every rank calls it."""
    failures = session.control.allgather(failure, list(range(session.control.size)))
    broken = [f"rank {rank}: {why}" for rank, why in enumerate(failures) if why]
    if broken:
        raise CheckpointError(
            f"the checkpoint {final} was not saved ({'; '.join(broken)}); the former one is still the newest"
        )


def agree_on_folder(session: Session, path: Path, tag: str | None) -> Path:
    """The same checkpoint on every rank: hosts with folders of their own may differ in which is their newest.

    Raises:
        CheckpointError: on every rank, when they have none in common.
    """
    try:
        found, problem = locate(path, tag), None
    except CheckpointError as error:
        found, problem = None, str(error)
    whole = sorted(
        (p for p in path.glob(f"*{PARTIAL}") if p.is_dir() and not p.name.startswith(".")),
        key=lambda p: p.stat().st_mtime_ns,
        reverse=True,
    )
    mine = (found.name if found else None, [p.name for p in whole], problem)
    everyone = session.control.allgather(mine, list(range(session.control.size)))
    if found is not None and all(name == found.name for name, _, _ in everyone):
        return found
    common = set.intersection(*(set(names) for _, names, _ in everyone))
    if tag is None and common:
        # The newest of the first rank's that all have.
        return path / next(name for name in everyone[0][1] if name in common)
    raise CheckpointError(
        next((why for _, _, why in everyone if why), None)
        or f"the ranks have no checkpoint in common in {path}: {[names for _, names, _ in everyone]}"
    )


def prune(parent: Path, keep: int, newest: str) -> None:
    """Remove the oldest partial checkpoints until ``keep`` are left; the newest always stays."""
    folders = sorted(
        (p for p in parent.glob(f"*{PARTIAL}") if p.is_dir() and not p.name.startswith(".")),
        key=lambda p: (p.name == newest, p.stat().st_mtime_ns),
    )
    for folder in folders[: max(0, len(folders) - max(1, keep))]:
        # Renamed first: a half removed folder must not look like a checkpoint.
        doomed = folder.with_name(f".{folder.name}.old")
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def locate(path: Path, tag: str | None) -> Path:
    """The partial checkpoint folder of ``tag`` (a tag or a folder name), or the newest.

    Raises:
        CheckpointError: there is none.
    """
    name = tag
    if name is None:
        pointer = path / NEWEST
        if not pointer.is_file():
            raise CheckpointError(
                f"there is no checkpoint to resume in {path}: the file {NEWEST!r} is missing; check the path, or train "
                "from the start"
            )
        name = pointer.read_text(encoding="utf-8").strip()
    for candidate in (path / name, path / f"{name}{PARTIAL}"):
        if candidate.is_dir():
            return candidate
    # A kill between two renames leaves the former folder under its old name.
    former = path / f".{name}.old"
    if tag is None and former.is_dir():
        return former
    found = sorted(p.name for p in path.glob(f"*{PARTIAL}")) if path.is_dir() else []
    raise CheckpointError(
        f"there is no partial checkpoint {name!r} in {path}; it holds {', '.join(found) or 'none'}: use one of these tags"
    )
