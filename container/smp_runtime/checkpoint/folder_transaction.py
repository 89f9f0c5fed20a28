"""A checkpoint folder: written aside, renamed when every rank is done, named in ``newest`` last."""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smp_runtime.checkpoint.files.atomic_file import make_folder, sync_folder, write_text
from smp_runtime.checkpoint.files.disk_space import naming_full_disk
from smp_runtime.checkpoint.files.manifest import (
    MANIFEST,
    NEWEST,
    newest_name,
)
from smp_runtime.checkpoint.folder_lock import LockHolder, SavingLocks
from smp_runtime.checkpoint.rank_agreement import decode_error, encode_error, met_by
from smp_runtime.checkpoint.saving.older_folders import (
    OWNER,
    SeenFolders,
    find_leftovers,
    find_surplus,
    hide,
    remove,
)
from smp_runtime.comm.control import host_name, timeout_seconds
from smp_runtime.errors import CheckpointError

if TYPE_CHECKING:
    from smp_runtime.checkpoint.rank_agreement import Exchange
    from smp_runtime.job.session import Session

logger = logging.getLogger("smp")

#: File in a folder that is being written: the save's token.
_TOKEN = ".token"
#: Longest wait for the removal of old checkpoints at the end of a job that has failed.
_SECONDS_AFTER_FAILURE = 0.5


class FolderTransaction:
    """Makes a folder appear whole: all ranks begin, write into :attr:`writing`, and commit together.

    Works on a folder that all hosts share and on one that each host has of its own: the first rank leaves a token
    in the folder, and the first rank of a host that does not see it knows that it must keep its own folder in order. A rank
    that keeps a folder in order holds its lock until the job ends: another job that saves there is refused.

    Args:
        session: all its ranks take part.

    Attributes:
        token: the same on all ranks, and for no other save; empty before :meth:`begin`.
        keeps_order: whether this rank creates and removes folders for its host; known after :meth:`begin`.
        hosts: by global rank, the number of its host, if hosts have folders of their own, else None; known after :meth:`begin`.
    """

    def __init__(self, session: Session, final: Path) -> None:
        self._is_first_of_host = session.ranks.local_rank == 0
        self.final = final
        # Before the locks: the session waits for it first, and another job must not remove the same folders meanwhile.
        self._removal = FolderRemoval.of(session)
        self._locks = SavingLocks.of(session)
        self._seen = session.ranks.keep(SeenFolders, SeenFolders)
        self.keeps_order = session.ranks.rank == 0
        self.hosts: list[int] | None = None
        #: What :meth:`_publish` has done so far, the last first, as what takes it back.
        self._done: list[Callable[[], object]] = []
        self.token = ""
        self.writing = self._writing("")

    def begin(self, exchange: Exchange, problem: str | None = None) -> None:
        """Make the folder that is written into, and learn which hosts have folders of their own.

        Args:
            exchange: every rank calls this with one, on whichever thread.
            problem: why this rank cannot take part, or None.

        Raises:
            CheckpointError: on every rank, when any rank has a problem.
        """
        token = ""
        if self.keeps_order:
            token = f"{random.SystemRandom().getrandbits(64):016x}"
            problem = problem or failure_of(lambda: self._restart(token))
        self.token = token = exchange.broadcast(token)
        #: Of this save alone: whoever else writes under the same tag writes elsewhere.
        self.writing = self._writing(token)
        if not self.keeps_order and self._is_first_of_host:
            problem = problem or failure_of(lambda: self._join(token))
        found = exchange.broadcast(exchange.gather([self.keeps_order, host_name(), problem]))
        failures = [(rank, host, why) for rank, (_, host, why) in enumerate(found) if why]
        if failures:
            self.abandon()
            raise not_saved(self.final, failures)
        names = list(dict.fromkeys(name for _, name, _ in found))
        separate = sum(keeps for keeps, _, _ in found) > 1
        self.hosts = [names.index(name) for _, name, _ in found] if separate else None

    def commit(self, exchange: Exchange, verdict: SaveVerdict | None, keep: int | None) -> None:
        """Write the manifest, rename the folder, point ``newest`` at it, and remove old ones.

        Hosts with folders of their own go through this step by step: nothing is removed before all have the new
        checkpoint, so whenever the job is killed there is one that all of them have.

        Args:
            exchange: every rank calls this with one.
            verdict: on rank 0; ignored elsewhere.
            keep: how many partial checkpoints stay, or None for all.

        Raises:
            CheckpointError: on every rank, when there is no manifest or a rank cannot rename; the former checkpoint
                stays the newest.
        """
        manifest, refusal = exchange.broadcast(
            None if verdict is None else [verdict.manifest, encode_error(verdict.refusal)]
        )
        error: CheckpointError | None
        if manifest is not None:
            error = self._agreed(exchange, lambda: self._prepare(manifest))
            if error is None:
                error = self._agreed(exchange, self._publish)
                if error is not None:
                    self._withdraw()
        else:
            error = decode_error(refusal)
        if error is None:
            self._tidy(keep)
        else:
            self.abandon()
        exchange.finish()
        if error is not None:
            raise error

    def time_of_save(self) -> float:
        """Return the time that orders this checkpoint among the others of its folder."""
        return self._seen.time_of_save(self.final.parent)

    def failure_of_writing(self, error: Exception) -> str:
        """Return a description of an error of a rank that writes, for the others."""
        if isinstance(error, FileNotFoundError) and not self.writing.is_dir():
            return (
                f"{self.writing} was removed while files were written into it: let nothing remove what a running job saves; "
                "hidden folders of ended jobs are removed by the next save"
            )
        return words_of(error)

    def abandon(self) -> None:
        """Remove what was written; the former checkpoint stays."""
        if self.keeps_order:
            shutil.rmtree(self.writing, ignore_errors=True)

    def _agreed(self, exchange: Exchange, step: Callable[[], object]) -> CheckpointError | None:
        """Run a step on each rank that keeps a folder in order.

        If it fails on any of them, return the same error on every rank.
        """
        why = failure_of(step) if self.keeps_order else None
        failures = exchange.gather([host_name(), why])
        # Only the first rank has what was gathered, so it decides for all.
        broken = []
        for rank, (host, reason) in enumerate(failures or []):
            if reason:
                broken.append((rank, host, reason))
        error = not_saved(self.final, broken) if broken else None
        return decode_error(exchange.broadcast(encode_error(error)))

    def _prepare(self, manifest: str) -> None:
        """Make the folder whole under its hidden name."""
        write_text(manifest, self.writing / MANIFEST)
        for name in (_TOKEN, OWNER):
            (self.writing / name).unlink(missing_ok=True)
        sync_folder(self.writing)

    def _publish(self) -> None:
        """Give the folder its name, beside the one that had it, and name it in ``newest``."""
        parent, pointed = self.final.parent, newest_name(self.final.parent)
        if self.final.exists():
            former = _free_name_of_former(self.final)
            self.final.rename(former)
            self._done.insert(0, lambda: former.rename(self.final))
        self.writing.rename(self.final)
        self._done.insert(0, lambda: self.final.rename(self.writing))
        self._done.insert(0, lambda: _point(parent, pointed))
        _point(parent, self.final.name)
        sync_folder(parent)

    def _withdraw(self) -> None:
        """Undo publishing, because another host could not publish the checkpoint."""
        for take_back in self._done:
            try:
                take_back()
            except Exception as error:
                # The remaining folder has its own manifest. Resuming finds out which checkpoint all hosts have.
                logger.warning("the folder of %s was not restored (%s: %s)", self.final, type(error).__name__, error)

    def _tidy(self, keep: int | None) -> None:
        """Hide checkpoints that are obsolete now that all hosts have the new one, and remove them while training goes on.

        If that fails, the new checkpoint is saved nevertheless.
        """
        if not self.keeps_order:
            return
        try:
            hidden, problems = hide(find_leftovers(self.final, self.hosts is not None))
            if keep is not None:
                more, failed = hide(find_surplus(self.final.parent, keep, self.final.name, self._seen))
                hidden, problems = hidden + more, problems + failed
            self._removal.start(self.final, list(dict.fromkeys(hidden)), problems)
        except Exception as error:
            warn_of_remains(self.final, [words_of(error)])

    def _writing(self, token: str) -> Path:
        return self.final.with_name(f".{self.final.name}.{token}.tmp")

    def _restart(self, token: str) -> None:
        writing = self._writing(token)
        self._removal.wait()  # there is never room for more checkpoints than are kept, and the new one
        with naming_full_disk(self.final, None):
            make_folder(self.final.parent)
            self._locks.hold(self.final.parent)
            if os.path.lexists(self.final) and not self.final.is_dir():
                raise CheckpointError(
                    f"{self.final} is a file or a link to nothing, where the checkpoint has a folder: remove it, or save with "
                    "another tag"
                )
            writing.mkdir()
        try:
            write_text(LockHolder.of_this_process().to_json(), writing / OWNER)
            write_text(token, writing / _TOKEN)
        except Exception:
            shutil.rmtree(writing, ignore_errors=True)
            raise

    def _join(self, token: str) -> None:
        """Take part in the first rank's folder, or make one for this host."""
        file = self.writing / _TOKEN
        if not file.is_file() or file.read_text() != token:
            self.keeps_order = True
            self._restart(token)


@dataclass(frozen=True)
class SaveVerdict:
    """What rank 0 makes of the reports of all.

    Attributes:
        manifest: its text; None if there is nothing to publish.
        refusal: then, why.
    """

    manifest: str | None
    refusal: CheckpointError | None = None


def not_saved(final: Path, failures: list[tuple[int, str, str]], former: str | None = None) -> CheckpointError:
    """Return the error for a checkpoint that some ranks could not write; it names the first of them as its origin.

    Args:
        failures: the ranks, their hosts, and the reasons.
        former: what happened to the former checkpoint; None for a partial one, beside which the newest stays.
    """
    if former is None:
        has_newest = newest_name(final.parent) is not None
        former = "the former one is still the newest" if has_newest else f"there is no earlier one in {final.parent}"
    broken = "; ".join(f"rank {rank}: {why}" for rank, _, why in failures)
    text = f"the checkpoint {final} was not saved ({broken}); {former}"
    return met_by(text, *failures[0][:2])


def refuse_if_any_failed(
    session: Session,
    failure: str | None,
    final: Path,
    former: str = "files that lay there may have been replaced in part",
) -> None:
    """Raise on every rank when any rank could not write its part; every rank calls it. See :func:`not_saved`."""
    failures = session.ranks.control.allgather((host_name(), failure), list(range(session.ranks.control.size)))
    broken = [(rank, host, why) for rank, (host, why) in enumerate(failures) if why]
    if broken:
        raise not_saved(final, broken, former)


class FolderRemoval:
    """Removes folders on a thread while training goes on, since freeing their blocks takes long.

    The folders have hidden names by then. If the job is killed meanwhile, a later save removes the rest.
    """

    outlives_regrouping = True

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, session: Session) -> FolderRemoval:
        """Return the removal of a session; always the same object."""

        def make() -> FolderRemoval:
            made = cls()
            session.at_leave.append(lambda: made.wait(_SECONDS_AFTER_FAILURE if session.has_failed else None))
            return made

        return session.ranks.keep(cls, make)

    def start(self, final: Path, folders: Sequence[Path], problems: Sequence[str]) -> None:
        """Begin to remove folders; those of the former call are gone.

        Args:
            final: the checkpoint that has been saved, for the warning.
            problems: what has failed already.
        """
        if not folders:
            warn_of_remains(final, problems)
            return
        self._thread = threading.Thread(
            target=lambda: warn_of_remains(final, [*problems, *remove(folders)]),
            name="smp-remove-checkpoints",
            daemon=True,  # the session waits for it when it closes
        )
        self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Block until all folders are gone, at most ``seconds``, by default ``SMP_TIMEOUT_SECONDS``."""
        if self._thread is not None:
            self._thread.join(timeout_seconds() if seconds is None else seconds)


def warn_of_remains(final: Path, problems: Sequence[str]) -> None:
    """Log which older checkpoints could not be removed, if there are any."""
    if problems:
        logger.warning(
            "the checkpoint %s is saved, but older ones could not be removed (%s): remove them by hand, or they take "
            "up space until the next save",
            final,
            "; ".join(problems),
        )


def _free_name_of_former(final: Path) -> Path:
    """Return an unused hidden name for a checkpoint that is replaced.

    A folder that already has such a name stays: it may be the only checkpoint that all hosts have.
    """
    names = (f".{final.name}{number}.old" for number in itertools.chain([""], map(".{}".format, itertools.count(2))))
    return next(path for name in names if not (path := final.with_name(name)).exists())


def failure_of(step: Callable[[], object]) -> str | None:
    """Run ``step`` and return a description of its error, or None.

    It catches every exception, because the other ranks wait for the result.
    """
    try:
        step()
    except Exception as error:
        return words_of(error)
    return None


def words_of(error: Exception) -> str:
    """Return an error's text for other ranks, with its type unless it is a CheckpointError."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _point(parent: Path, name: str | None) -> None:
    """Make ``newest`` name a folder, or nothing."""
    if name is None:
        (parent / NEWEST).unlink(missing_ok=True)
    else:
        write_text(name, parent / NEWEST)
