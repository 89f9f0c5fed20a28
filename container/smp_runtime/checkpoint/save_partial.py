"""Writing a partial checkpoint: every rank its own files, at once or on a thread while training goes on."""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from smp_config import Group
from smp_config.limits import wants_flat_groups
from smp_config.version import __version__
from smp_runtime.checkpoint.files.atomic_file import write_recorded
from smp_runtime.checkpoint.files.manifest import (
    EXTRA,
    MASTER,
    MODULE,
    PARTITION,
    POSITIONS,
    USER_CONTENT,
    FileRecord,
    Manifest,
    OptimizerRecord,
    Piece,
    TensorRecord,
)
from smp_runtime.checkpoint.files.name_translation import translation_names
from smp_runtime.checkpoint.files.transformers_format import CONFIG, config_of
from smp_runtime.checkpoint.folder_transaction import FolderTransaction, SaveVerdict, not_saved, words_of
from smp_runtime.checkpoint.live_state import ScriptPosition, random_file, updated_parameters
from smp_runtime.checkpoint.rank_agreement import (
    ControlExchange,
    Exchange,
    SecondConnection,
    StoreExchange,
    second_connection,
)
from smp_runtime.checkpoint.save_plan import Apart, SavePlan, WriteShare, contents_of, optimizer_record
from smp_runtime.comm.control import host_name, timeout_seconds
from smp_runtime.errors import DeadlineError
from smp_runtime.tensors.host_memory.snapshot import ChangedWhileCopiedError, StagingArena, TensorSnapshot

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.optim.distributed_optimizer import DistributedOptimizer

logger = logging.getLogger("smp")


@dataclass
class Report:
    """What a rank has written.

    Attributes:
        failure: why it could not, or None.
        pieces: by file, state key and name.
        buffers: the same.
    """

    failure: str | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)
    pieces: dict[str, dict[str, dict[str, Piece]]] = field(default_factory=dict)
    parameters: dict[str, TensorRecord] = field(default_factory=dict)
    buffers: dict[str, TensorRecord] = field(default_factory=dict)
    host: str = ""  # the rank's host, if the report was sent to rank 0

    def to_json(self) -> list[Any]:
        """Return the report for rank 0, in the format of a manifest."""
        return [self.failure, host_name(), Manifest("", files=self.files, **self._tensors()).to_json()]

    @classmethod
    def from_json(cls, found: list[Any]) -> Report:
        """Return a report from the result of :meth:`to_json`."""
        failure, host, text = found
        told = Manifest.from_json(text)
        return cls(failure, told.files, told.pieces, told.parameters, told.buffers, host)

    def _tensors(self) -> dict[str, Any]:
        return {"pieces": self.pieces, "parameters": self.parameters, "buffers": self.buffers}


@dataclass(frozen=True)
class Described:
    """What rank 0 knows of the whole checkpoint before anything is written."""

    tag: str
    topology: dict[str, Any]
    precision: str
    optimizer: OptimizerRecord | None
    translations: list[str]
    order: list[str]
    steps: int
    has_content: bool


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
        #: Of the save that is written, whose tensors the next update would change.
        self._snapshot: TensorSnapshot | None = None
        #: Whether something else than an update has changed the optimizer's state during a save.
        self._copies_at_once = False
        session.before_update.append(lambda _: self._finish_copies())
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

    def _finish_copies(self) -> None:
        """Block until the save that is written has copied all that an update changes."""
        snapshot = self._snapshot
        if snapshot is not None and not snapshot.wait(timeout_seconds()):
            raise DeadlineError(
                f"the optimizer's state is not copied for the checkpoint after {timeout_seconds():.0f} s; look at the machine's "
                "memory, or raise SMP_TIMEOUT_SECONDS"
            )
        self._snapshot = None

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
        problem: str | None = None
        content, flat = b"", False
        try:
            self.wait()
        except Exception as error:
            problem = f"the checkpoint before this one was not saved: {error}"
        try:
            if session.ranks.rank == 0:
                content = user_content()
                flat = wants_flat_groups(os.environ)
        except Exception as error:  # report any error, because the other ranks wait for the outcome
            problem = problem or words_of(error)
        transaction = FolderTransaction(session, final, problem)
        if transaction.hosts is not None:  # the same file on every host
            content = session.ranks.control.broadcast(content, list(range(session.ranks.control.size)))
        if session.ranks.cfg.sharded_data_parallel_degree > 1:  # of rank 0, since the ranks exchange parts for it
            flat = session.ranks.control.broadcast(flat, list(range(session.ranks.control.size)))
        else:
            flat = False
        exchange = self._background_exchange(transaction.token) if in_background else None
        # Separate from the next block: ranks may wait for each other in it, so all of them must enter it.
        described, undescribed = None, None
        try:
            described = (
                describe(session, tag, model, optimizer, has_content=has_content) if session.ranks.rank == 0 else None
            )
        except Exception as error:  # report any error, because the other ranks wait for the outcome
            undescribed = words_of(error)
        report, jobs, first = Report(), dict[str, Callable[[], Any]](), None
        snapshot = TensorSnapshot() if exchange is not None else None
        try:
            apart = Apart(snapshot.keep, self._sharding_group(model)) if snapshot is not None and flat else None
            share = WriteShare(session, transaction.hosts)
            made = contents_of(session, model, optimizer, share, apart, as_held=not flat)
            report = Report(None, {}, made.pieces, made.parameters, made.buffers)
            first = made.first
            moment = moment or ScriptPosition.now(session)
            jobs = self._jobs(made, model, content, transaction, moment, snapshot)
        except Exception as error:  # report any error, because the other ranks wait for the outcome
            report.failure = words_of(error)
        report.failure = undescribed or report.failure
        complete = functools.partial(_complete, transaction, report, first, jobs, described, keep, flat)
        if exchange is None or snapshot is None:
            complete(ControlExchange(session.ranks.control))
            return
        self._snapshot = snapshot
        self._thread = threading.Thread(
            target=self._in_background,
            args=(snapshot, report, functools.partial(complete, exchange)),
            name="smp-checkpoint",
            daemon=True,  # the session waits for it when it closes, in time and in good order
        )
        self._thread.start()

    def _background_exchange(self, title: str) -> Exchange | None:
        """Return the exchange that the ranks use while training continues; None on all ranks if one has none.

        The connection is made in the first save: it takes several messages, for which training would wait each time.
        """
        control = self._session.ranks.control
        if control.size == 1:
            return ControlExchange(control)
        if self._connection is None:
            found = second_connection(control, "smp-checkpoint", "checkpoints")
            if all(control.allgather(found is not None, list(range(control.size)))):
                self._connection = found
        if self._connection is not None:
            # One save uses it at a time, and the title, which no other save has, is part of what is sealed.
            return StoreExchange(self._connection.store, control.rank, control.size, title, self._connection.secret)
        if control.rank == 0:
            logger.warning("async_save needs a newer PyTorch: this checkpoint is saved at once")
        return None

    def _in_background(self, snapshot: TensorSnapshot, report: Report, complete: Callable[[], None]) -> None:
        try:
            snapshot.copy_rest(self.arena)
            self.arena.pin_later()
        except ChangedWhileCopiedError as error:
            self._copies_at_once = True
            report.failure = report.failure or f"{error}; later saves of this job copy everything at once"
        except Exception as error:  # report any error, because the other ranks wait for the outcome
            report.failure = report.failure or words_of(error)
        try:
            complete()
        except Exception as error:
            logger.error("%s", error)
            self._error = error

    def _jobs(
        self,
        made: SavePlan,
        model: DistributedModel,
        content: bytes,
        transaction: FolderTransaction,
        moment: ScriptPosition,
        snapshot: TensorSnapshot | None,
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
        if transaction.keeps_order:
            jobs |= {name: _given(found) for name, found in files_of_job(model, content, moment).items()}
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
    """Return the names, as a plan gives them to ``keep``, of tensors that nothing but the optimizer's update changes."""
    return {
        f"{key}/{name}"
        for keys in made.pieces.values()
        for key, pieces in keys.items()
        if key not in (MODULE, MASTER, EXTRA)
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


def _complete(
    transaction: FolderTransaction,
    report: Report,
    first: Callable[[], None] | None,
    jobs: Mapping[str, Callable[[], Any]],
    described: Described | None,
    keep: int | None,
    together: bool,
    exchange: Exchange,
) -> None:
    """Write this rank's files, and commit with all ranks.

    Args:
        together: whether some rank has a ``first``: then none calls its own unless all can.
    """
    goes_on = report.failure is None
    if together:
        failures = exchange.gather(report.failure)
        goes_on = exchange.broadcast(failures is not None and not any(failures))
    try:
        if goes_on and first is not None:
            first()
        for name, make in jobs.items() if goes_on else ():
            report.files[name] = write_recorded(make(), transaction.writing / name)
    except Exception as error:  # report any error, because the other ranks wait for the outcome
        report.failure = words_of(error)
    reports = exchange.gather(report.to_json())
    verdict = None if reports is None else _verdict(transaction, described, reports)
    transaction.commit(exchange, verdict, keep)


def _verdict(transaction: FolderTransaction, described: Described | None, reports: list[Any]) -> SaveVerdict:
    """Return the manifest's text, or an error; never raise, since the other ranks wait for it."""
    try:
        found = [Report.from_json(report) for report in reports]
        broken = []
        for rank, report in enumerate(found):
            if report.failure:
                broken.append((rank, report.host, report.failure))
        if described is not None and not broken:
            return SaveVerdict(merge(described, found, transaction.token).to_json())
    except Exception as error:
        broken = [(0, host_name(), words_of(error))]
    return SaveVerdict(None, not_saved(transaction.final, broken))


def describe(
    session: Session,
    tag: str,
    model: DistributedModel,
    optimizer: DistributedOptimizer | None,
    *,
    has_content: bool = True,
) -> Described:
    """Return the values of the manifest that do not depend on the files that ranks have written."""
    topology = {
        "world_size": session.ranks.control.size,
        "pipeline": session.ranks.size(Group.PP),
        "tensor": session.ranks.size(Group.TP),
        "sharded": session.ranks.cfg.sharded_data_parallel_degree,
        "shard_optimizer_state": session.ranks.cfg.shard_optimizer_state,
        "placement": session.ranks.topology.placement,
    }
    precision = "fp16" if session.ranks.cfg.fp16 else "bf16" if session.ranks.cfg.bf16 else "fp32"
    entries = updated_parameters(model, optimizer) if optimizer is not None else []
    return Described(
        tag,
        topology,
        precision,
        optimizer_record(optimizer, entries) if optimizer is not None else None,
        translation_names(session.module_manager.translate_functions),
        list(model.module.state_dict(keep_vars=True)),
        session.progress.step,
        has_content,
    )


def merge(described: Described, reports: list[Report], save: str) -> Manifest:
    """Merge the reports of all ranks into one manifest; the first of several copies of a file counts.

    Args:
        save: an id, the same on every host and different for every save.
    """
    manifest = Manifest(
        described.tag,
        time.time(),
        __version__,
        described.topology,
        described.precision,
        optimizer=described.optimizer,
        translations=described.translations,
        save=save,
        steps=described.steps,
        has_content=described.has_content,
    )
    for report in reports:
        for name, record in report.files.items():
            former = manifest.files.setdefault(name, record)
            if record.checksum not in former.checksums:
                manifest.files[name] = replace(former, copies=(*former.copies, record.checksum))
        for file, pieces in report.pieces.items():
            manifest.pieces.setdefault(file, pieces)
        manifest.parameters.update(report.parameters)
        manifest.buffers.update(report.buffers)
    for records in (manifest.parameters, manifest.buffers):
        ordered = {name: records[name] for name in described.order if name in records}
        rest = {name: record for name, record in records.items() if name not in ordered}
        records.clear()
        records.update({**ordered, **rest})
    if manifest.optimizer is not None:
        keys = {
            key
            for found in manifest.pieces.values()
            for key, pieces in found.items()
            if any(not piece.whole_object for piece in pieces.values())
        }
        manifest.optimizer.states = sorted(keys - {"module", "master"})
    return manifest
