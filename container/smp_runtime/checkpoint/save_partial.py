"""Writing a partial checkpoint: every rank its own files, at once or on a thread while training goes on."""

from __future__ import annotations

import base64
import functools
import json
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from smp_config import Group
from smp_config.limits import LAYOUT_VARIABLE, wants_flat_groups
from smp_runtime.checkpoint.files.atomic_file import write_recorded
from smp_runtime.checkpoint.files.manifest import EXTRA, MODULE, PARTITION, POSITIONS, USER_CONTENT, FileRecord
from smp_runtime.checkpoint.files.transformers_format import CONFIG, config_of
from smp_runtime.checkpoint.folder_transaction import FolderTransaction, SaveVerdict, not_saved, words_of
from smp_runtime.checkpoint.live_state import ScriptPosition, random_file
from smp_runtime.checkpoint.rank_agreement import (
    ControlExchange,
    Exchange,
    SecondConnection,
    StoreExchange,
    second_connection,
)
from smp_runtime.checkpoint.saving.flat_buffers import Apart
from smp_runtime.checkpoint.saving.save_plan import SHARDS, SavePlan, WriteShare, contents_of
from smp_runtime.checkpoint.saving.save_report import Described, Report, describe, merge
from smp_runtime.comm.control import host_name, timeout_seconds
from smp_runtime.errors import DeadlineError
from smp_runtime.tensors.host_memory.snapshot import (
    ChangedWhileCopiedError,
    StagingArena,
    TensorSnapshot,
    wait_for_copies,
)

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.optim.distributed_optimizer import DistributedOptimizer

from smp_runtime.tensors.host_memory.worker_threads import WorkerThreads

logger = logging.getLogger("smp")

#: Files that a rank writes at once.
WRITERS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class _KnownFolder:
    """What all ranks know of saves into a folder since the first of them, so that later asynchronous ones need not ask.

    Attributes:
        hosts: see :class:`WriteShare`.
        flat: whether the parts of sharded parameters are exchanged, for other tools.
    """

    hosts: list[int] | None
    flat: bool


@dataclass
class _Save:
    """One save, from the call of the script to the checkpoint in its place; the second part may run on a thread.

    Attributes:
        transaction: of its folder.
        content: the script's own, on rank 0.
        keep: how many checkpoints stay.
        problem: why this rank cannot take part.
        assumed: what the plan was made for, if the transaction begins on the thread; else None.
        flat: as in :class:`_KnownFolder`.
        asks_for_other: whether this rank, the first, wants another layout than the plan has; None where there is but one.
        has_other_layout: the same on all ranks, which they know once the save has begun.
        first: what ranks do together before any of them writes.
        jobs: what makes the content of each of this rank's files.
        texts: files that a host has once.
        is_in_memory: whether files need no further host memory when they are made, so that several can be written at once.
    """

    transaction: FolderTransaction
    content: bytes
    keep: int | None
    problem: str | None = None
    assumed: _KnownFolder | None = None
    flat: bool = False
    asks_for_other: bool | None = None
    has_other_layout: bool = False
    report: Report = field(default_factory=Report)
    first: Callable[[], None] | None = None
    jobs: dict[str, Callable[[], Any]] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    described: Described | None = None
    is_in_memory: bool = True

    @property
    def is_elsewhere(self) -> bool:
        """Return whether the folder is shared by other hosts than it was planned for; all ranks find the same."""
        return bool(self.assumed and self.transaction.token and self.transaction.hosts != self.assumed.hosts)

    def begin(self, exchange: Exchange) -> None:
        """Begin the transaction, unless it has begun; raises as it does."""
        if self.transaction.token:
            return
        self.transaction.begin(exchange, self.problem)
        if self.is_elsewhere:
            self.transaction.abandon()
            why = "its folder was shared by all hosts and is not any more, or the other way round: save again"
            raise not_saved(self.transaction.final, [(0, host_name(), why)])
        if self.asks_for_other is not None:
            self.has_other_layout = exchange.broadcast(self.asks_for_other)

    def complete(self, exchange: Exchange) -> None:
        """Write this rank's files, and commit with all ranks."""
        self.begin(exchange)
        transaction, report = self.transaction, self.report
        content = self.content
        if transaction.hosts is not None:  # the same file on every host
            content = base64.b64decode(exchange.broadcast(base64.b64encode(content).decode()))
        goes_on = report.failure is None
        if self.flat:  # some rank has a first: then none calls its own unless all can
            failures = exchange.gather(report.failure)
            goes_on = exchange.broadcast(failures is not None and not any(failures))
        try:
            if goes_on and self.first is not None:
                self.first()
            if goes_on:
                self._write(content)
        except Exception as error:  # report any error, because the other ranks wait for the outcome
            report.failure = transaction.failure_of_writing(error)
        reports = exchange.gather(report.to_json())
        verdict = None if reports is None else _verdict(transaction, self.described, reports)
        transaction.commit(exchange, verdict, self.keep)

    def _write(self, content: bytes) -> None:
        jobs = dict(self.jobs)
        if self.transaction.keeps_order:
            jobs |= {name: _given(found) for name, found in {**self.texts, USER_CONTENT: content}.items()}

        def write(name: str) -> FileRecord:
            return write_recorded(jobs[name](), self.transaction.writing / name)

        if not self.is_in_memory:
            self.report.files |= {name: write(name) for name in jobs}
            return
        # Hashing and writing release Python's lock, and the disk is not idle between two files.
        with WorkerThreads(min(len(jobs), WRITERS), "smp-writing") as writers:
            self.report.files |= dict(zip(jobs, writers.map(write, list(jobs)), strict=True))


class Saver:
    """Saves partial checkpoints of a session, one after the other.

    Attributes:
        arena: host memory for the copies of asynchronous saves. It stays until the session closes.
    """

    def __init__(self, session: Session) -> None:
        # Weak, since the session keeps this object until it closes.
        self._reference = weakref.ref(session)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.arena = StagingArena(session.ranks.device)
        self._group: dist.ProcessGroup | None = None
        self._connection: SecondConnection | None = None
        #: Of the exchanges over that connection, each with a number of its own: what comes before it.
        self._title = ""
        self._exchanges = 0
        #: By folder of checkpoints.
        self._agreed: dict[Path, _KnownFolder] = {}
        #: Whether something else than an update has changed the optimizer's state during a save.
        self._copies_at_once = False
        session.before_update.append(lambda _: wait_for_copies())
        session.at_close.append(self.wait)
        session.at_close.append(self.arena.close)

    @property
    def _session(self) -> Session:
        session = self._reference()
        if session is None:
            raise AssertionError("a saver outlived its session")
        return session

    @classmethod
    def of(cls, session: Session) -> Saver:
        """Return the saver of a session; always the same object."""
        return session.ranks.keep(cls, lambda: cls(session))

    def wait(self) -> None:
        """Block until the checkpoint that is being written is complete, and named in ``newest``.

        Raises:
            CheckpointError: it could not be written.
            DeadlineError: it took longer than ``SMP_TIMEOUT_SECONDS``.
        """
        thread = self._thread
        if thread is not None:
            thread.join(timeout_seconds())
            if thread.is_alive():
                raise DeadlineError(
                    f"the checkpoint that is written in the background is not complete after {timeout_seconds():.0f} s; look at "
                    "the disk and at the other ranks, or raise SMP_TIMEOUT_SECONDS"
                )
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def save(
        self,
        final: Path,
        tag: str,
        model: DistributedModel,
        optimizer: DistributedOptimizer | None,
        user_content: Callable[[], bytes],
        *,
        keep: int | None,
        in_background: bool,
        has_content: bool = True,
        moment: ScriptPosition | None = None,
    ) -> None:
        """Save a checkpoint; every rank calls it. See ``save_checkpoint``.

        Args:
            has_content: whether ``user_content`` is anything but None.
            moment: to which the checkpoint belongs; None for now. The model and the optimizer must not have changed since.
        """
        session = self._session
        problem, content, flat = self._former_problem(), b"", False
        try:
            final = final.absolute()  # the script may change its working folder while files are written
            if session.ranks.rank == 0:
                content = user_content()
                flat = wants_flat_groups(os.environ)
        except Exception as error:  # report any error, because the other ranks wait for the outcome
            problem = problem or words_of(error)
        exchange = self._background_exchange() if in_background else None
        save = _Save(FolderTransaction(session, final), content, keep, problem)
        # Then nothing here waits for other ranks: even an error is told to them behind their backs.
        save.assumed = self._agreed.get(final.parent) if exchange is not None else None
        agreed = save.assumed or self._agree(save, flat)
        if save.assumed is not None:
            self._compare_layout(save, save.assumed, flat)
        snapshot = TensorSnapshot() if exchange is not None else None
        if save.assumed is None or problem is None:
            self._plan(save, agreed, snapshot, model, optimizer, moment)
        # Separate from the plan, in which ranks may wait for each other: all of them must make one.
        try:
            if session.ranks.rank == 0:
                save.described = describe(session, tag, model, optimizer, has_content=has_content)
        except Exception as error:  # report any error, because the other ranks wait for the outcome
            save.report.failure = words_of(error)
        if exchange is None or snapshot is None:
            save.complete(ControlExchange(session.ranks.control))
            return
        self._thread = threading.Thread(
            target=self._in_background,
            args=(snapshot, save, exchange),
            name="smp-checkpoint",
            daemon=True,  # the session waits for it when it closes, in time and in good order
        )
        self._thread.start()
        if save.assumed is not None and problem is not None:
            self.wait()

    def _compare_layout(self, save: _Save, assumed: _KnownFolder, flat: bool) -> None:
        """Let the thread tell all ranks whether rank 0 wants another layout than they have agreed on: the next save has it."""
        ranks = self._session.ranks
        if not self._may_be_flat:
            return
        save.asks_for_other = ranks.rank == 0 and save.problem is None and flat != assumed.flat
        if save.asks_for_other:
            logger.warning(
                "%s has the former layout: %s was changed after the first save into its folder, and an asynchronous save does not "
                "ask all ranks; the next save has the new one",
                save.transaction.final,
                LAYOUT_VARIABLE,
            )

    def _former_problem(self) -> str | None:
        """Wait for the save before, and return why it failed; raise if it has not ended, since it still uses the connection."""
        try:
            self.wait()
        except Exception as error:
            if self._thread is not None:
                raise
            return f"the checkpoint before this one was not saved: {error}"
        return None

    @property
    def _may_be_flat(self) -> bool:
        return self._session.ranks.cfg.sharded_data_parallel_degree > 1

    def _agree(self, save: _Save, flat: bool) -> _KnownFolder:
        """Begin a save with all ranks, and keep what they agree on; ``flat`` is what rank 0 wants."""
        session = self._session
        exchange = ControlExchange(session.ranks.control)
        save.begin(exchange)
        # Of rank 0, since the ranks exchange parts for it.
        flat = self._may_be_flat and exchange.broadcast(flat)
        agreed = self._agreed[save.transaction.final.parent] = _KnownFolder(save.transaction.hosts, flat)
        return agreed

    def _background_exchange(self) -> Exchange | None:
        """Return the exchange that the ranks use while training continues; None on all ranks if one has none.

        The connection is made in the first save: it takes several messages, for which training would wait each time.
        """
        control = self._session.ranks.control
        if control.size == 1:
            return ControlExchange(control)
        if self._connection is None:
            everyone = list(range(control.size))
            found = second_connection(control, "smp-checkpoint", "checkpoints")
            self._title = control.broadcast(secrets.token_hex(8), everyone)
            if all(control.allgather(found is not None, everyone)):
                self._connection = found
        if self._connection is not None:
            # One save uses it at a time, and the title, which no other save has, is part of what is sealed.
            self._exchanges += 1
            title = f"{self._title}/{self._exchanges}"
            return StoreExchange(self._connection.store, control.rank, control.size, title, self._connection.secret)
        if control.rank == 0:
            logger.warning("async_save needs a newer PyTorch: this checkpoint is saved at once")
        return None

    def _in_background(self, snapshot: TensorSnapshot, save: _Save, exchange: Exchange) -> None:
        report = save.report
        try:
            snapshot.copy_rest(self.arena)
            self.arena.pin_later()
        except ChangedWhileCopiedError as error:
            self._copies_at_once = True
            report.failure = report.failure or f"{error}; later saves of this job copy everything at once"
        except Exception as error:  # report any error, because the other ranks wait for the outcome
            report.failure = report.failure or words_of(error)
        try:
            save.complete(exchange)
        except Exception as error:
            logger.error("%s", error)
            self._error = error
        if save.is_elsewhere or save.has_other_layout:  # for all ranks alike: the next save asks again
            self._agreed.pop(save.transaction.final.parent, None)

    def _plan(
        self,
        save: _Save,
        agreed: _KnownFolder,
        snapshot: TensorSnapshot | None,
        model: DistributedModel,
        optimizer: DistributedOptimizer | None,
        moment: ScriptPosition | None,
    ) -> None:
        """Work out what this rank writes; with ``snapshot`` the state is that of now, whenever it is written."""
        session = self._session
        save.flat = agreed.flat
        save.is_in_memory = snapshot is not None or session.ranks.device.type == "cpu"
        try:
            share = WriteShare(session, agreed.hosts)
            apart = None
            if snapshot is not None and agreed.flat:
                apart = Apart(snapshot.keep, self._sharding_group(model))
            made = contents_of(session, model, optimizer, share, apart, as_held=not agreed.flat)
            save.report = Report(None, {}, made.pieces, made.parameters, made.buffers)
            save.first = made.first
            moment = moment or ScriptPosition.now(session)
            save.jobs = self._jobs(made, moment, snapshot)
            if session.ranks.rank == 0 or agreed.hosts is not None:
                save.texts = files_of_job(model, b"", moment)
        except Exception as error:  # report any error, because the other ranks wait for the outcome
            save.report.failure = words_of(error)

    def _jobs(
        self, made: SavePlan, moment: ScriptPosition, snapshot: TensorSnapshot | None
    ) -> dict[str, Callable[[], Any]]:
        """Return functions that build the content of each file; with ``snapshot`` everything is copied now."""
        session = self._session
        jobs: dict[str, Callable[[], Any]] = {}
        updated = set[str]() if self._copies_at_once else _only_updated(made)
        for name, build in made.files.items():
            if snapshot is not None:
                jobs[name] = _given(build(functools.partial(_keep, snapshot, updated)))
            else:
                jobs[name] = functools.partial(build, _live)
        jobs[random_file(session.ranks.rank)] = _given(moment.random)
        if snapshot is not None:
            snapshot.copy_to(self.arena)
            if session.ranks.device.type == "cuda":
                # Also before the thread's copies, which run on a stream of their own.
                torch.cuda.current_stream(session.ranks.device).synchronize()
        return jobs

    def _sharding_group(self, model: DistributedModel) -> dist.ProcessGroup | None:
        """Return a second process group of this rank's sharding group, for the writing thread.

        Every rank makes all of these groups.
        """
        session = self._session
        if model.shards is None or self._group is not None:
            return self._group
        timeout = timedelta(seconds=timeout_seconds())
        # PyTorch wants every rank of the job to call new_group for every group, in the same order.
        for ranks in session.ranks.topology.groups(Group.SHARD):
            group = dist.new_group(ranks, timeout=timeout, backend="gloo")
            if session.ranks.rank in ranks:
                self._group = group
        return self._group


def files_of_job(model: DistributedModel, content: bytes, moment: ScriptPosition) -> dict[str, bytes]:
    """Return the files that a checkpoint has once, for any number of ranks, without its manifest.

    Args:
        content: the script's own content, as ``user_content_bytes`` returns it.
        moment: the position of the checkpoint.
    """
    files = {USER_CONTENT: content}
    if moment.positions:
        files[POSITIONS] = (json.dumps(moment.positions, indent=1) + "\n").encode()
    if model.assignment is not None:
        files[PARTITION] = (json.dumps(model.assignment.to_dict(), indent=1) + "\n").encode()
    config = config_of(model.module)
    if config is not None:  # so that the weights can become a model of Transformers again
        files[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    return files


def _only_updated(made: SavePlan) -> set[str]:
    """Return the names, as a plan gives them to ``keep``, of tensors that no script holds.

    They are states and float32 weights of the optimizer, and parts of sharded parameters. The optimizer's update changes them, and
    where the library brings a script's writes to them, it waits for the copies.
    """
    return {
        # Of parameters, only those that are shared out are named so.
        f"{SHARDS if key == MODULE else key}/{name}"
        for keys in made.pieces.values()
        for key, pieces in keys.items()
        if key != EXTRA
        for name, piece in pieces.items()
        if not piece.whole_object
    }


def _keep(snapshot: TensorSnapshot, updated: Container[str], name: str, tensor: torch.Tensor) -> torch.Tensor:
    return snapshot.keep_until_update(name, tensor) if name in updated else snapshot.keep(name, tensor)


def _given(value: Any) -> Callable[[], Any]:
    return lambda: value


def _live(_: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the CPU, without other data in its storage."""
    tensor = tensor.detach().cpu()
    alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if alone else tensor.clone()


def _verdict(transaction: FolderTransaction, described: Described | None, reports: list[Any]) -> SaveVerdict:
    """Return the manifest's text, or an error; never raise, since the other ranks wait for it."""
    try:
        found = [Report.from_json(report) for report in reports]
        broken = []
        for rank, report in enumerate(found):
            if report.failure:
                broken.append((rank, report.host, report.failure))
        if described is not None and not broken:
            manifest = merge(described, found, transaction.token)
            manifest.saved = transaction.time_of_save()
            return SaveVerdict(manifest.to_json())
    except Exception as error:
        broken = [(0, host_name(), words_of(error))]
    return SaveVerdict(None, not_saved(transaction.final, broken))
