"""A checkpoint folder: written aside, renamed when every rank is done, named in ``newest`` last."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from smp_runtime.checkpoint.agreement import Exchange
from smp_runtime.checkpoint.files import write_text
from smp_runtime.checkpoint.manifest import MANIFEST, NEWEST, PARTIAL, checkpoints_in
from smp_runtime.errors import CheckpointError
from smp_runtime.session import Session, host_name


class FolderTransaction:
    """Makes a folder appear whole: all ranks enter, write into :attr:`writing`, and commit together.

    Works on a folder that all hosts share and on one that each host has of its own: the first rank leaves a token
    in the folder, and the first rank of a host that does not see it knows that it must keep its own folder in order.

    Args:
        session: all its ranks take part.
        final: where the folder shall appear.
        problem: why this rank cannot take part, or None.

    Attributes:
        final: where it shall appear.
        writing: the folder to write into.
        token: the same on all ranks, and for no other save.
        keeps_order: whether this rank creates and removes folders for its host.
        hosts: by global rank, the number of its host, if hosts have folders of their own, else None.

    Raises:
        CheckpointError: on every rank, when any rank has a problem.
    """

    def __init__(self, session: Session, final: Path, problem: str | None = None) -> None:
        control, everyone = session.control, list(range(session.control.size))
        self._rank = session.rank
        self.final = final
        self.writing = final.with_name(f".{final.name}.tmp")
        self.keeps_order = session.rank == 0
        token = ""
        if self.keeps_order:
            token = f"{random.SystemRandom().getrandbits(64):016x}"
            problem = problem or self._restart(token)
        self.token = token = control.broadcast(token, everyone)
        if not self.keeps_order and session.local_rank == 0 and not self._has_token(token):
            problem = problem or self._restart(token)
            self.keeps_order = True
        found = control.allgather((self.keeps_order, host_name(), problem), everyone)
        failures = [(rank, why) for rank, (_, _, why) in enumerate(found) if why]
        if failures:
            self.abandon()
            raise not_saved(final, failures)
        names = list(dict.fromkeys(name for _, name, _ in found))
        separate = sum(keeps for keeps, _, _ in found) > 1
        self.hosts = [names.index(name) for _, name, _ in found] if separate else None

    def commit(self, exchange: Exchange, verdict: str | CheckpointError | None, keep: int | None) -> None:
        """Write the manifest, rename the folder, point ``newest`` at it, and remove old ones.

        Args:
            exchange: every rank calls this with one.
            verdict: the manifest's text on rank 0, or why there is none.
            keep: how many partial checkpoints stay, or None for all.

        Raises:
            CheckpointError: on every rank, when there is no manifest or a rank cannot rename; the former checkpoint
                stays the newest.
        """
        verdict = exchange.broadcast(verdict)
        problem = None
        if isinstance(verdict, str) and self.keeps_order:
            try:
                self._publish(verdict)
                if keep is not None:
                    prune(self.final.parent, keep, self.final.name)
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
        if not isinstance(verdict, str):
            self.abandon()
        failures = exchange.gather(problem)
        broken = [(rank, why) for rank, why in enumerate(failures or []) if why]
        outcome = exchange.broadcast(not_saved(self.final, broken) if broken else verdict)
        exchange.finish()
        if not isinstance(outcome, str):
            raise outcome

    def abandon(self) -> None:
        """Remove what was written; the former checkpoint stays."""
        if self.keeps_order:
            shutil.rmtree(self.writing, ignore_errors=True)

    def _publish(self, manifest: str) -> None:
        write_text(manifest, self.writing / MANIFEST)
        self._token_file.unlink(missing_ok=True)
        _sync(self.writing)
        former = self.final.with_name(f".{self.final.name}.old")
        if self.final.exists():
            shutil.rmtree(former, ignore_errors=True)
            self.final.rename(former)
        self.writing.rename(self.final)
        write_text(self.final.name, self.final.parent / NEWEST)
        _sync(self.final.parent)
        shutil.rmtree(former, ignore_errors=True)

    @property
    def _token_file(self) -> Path:
        return self.writing / ".token"

    def _restart(self, token: str) -> str | None:
        try:
            shutil.rmtree(self.writing, ignore_errors=True)
            self.writing.mkdir(parents=True)
            self._token_file.write_text(token)
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _has_token(self, token: str) -> bool:
        return self._token_file.is_file() and self._token_file.read_text() == token


def not_saved(final: Path, failures: list[tuple[int, str]]) -> CheckpointError:
    """The error of a checkpoint that some ranks could not write."""
    broken = "; ".join(f"rank {rank}: {why}" for rank, why in failures)
    return CheckpointError(f"the checkpoint {final} was not saved ({broken}); the former one is still the newest")


def refuse_if_any_failed(session: Session, failure: str | None, final: Path) -> None:
    """Raise on every rank when any rank could not write its part; every rank calls it."""
    failures = session.control.allgather(failure, list(range(session.control.size)))
    broken = [(rank, why) for rank, why in enumerate(failures) if why]
    if broken:
        raise not_saved(final, broken)


def prune(parent: Path, keep: int, newest: str) -> None:
    """Remove the oldest partial checkpoints until ``keep`` are left; the newest always stays, unfinished ones go first."""
    found = [c for c in checkpoints_in(parent) if not c.folder.name.startswith(".")]
    order = sorted(found, key=lambda c: (c.name == newest, c.is_whole, c.manifest.saved if c.manifest else 0.0))
    for old in order[: max(0, len(order) - max(1, keep))]:
        # Renamed first: a half removed folder must not look like a checkpoint.
        doomed = old.folder.with_name(f".{old.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        old.folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    # What killed jobs have left; this one writes one checkpoint at a time, and that one has its name now.
    for leftover in (*parent.glob(f".*{PARTIAL}.removed"), *parent.glob(f".*{PARTIAL}.tmp")):
        shutil.rmtree(leftover, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
