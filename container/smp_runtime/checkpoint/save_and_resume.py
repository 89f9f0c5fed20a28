"""``save_checkpoint`` and ``resume_from_checkpoint``: model, optimizer, random state and the script's own content."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smp_config import Group
from smp_config.errors import kind_of
from smp_records.rank_record import SAVE, current_record
from smp_runtime.checkpoint import full_checkpoint as full
from smp_runtime.checkpoint.adapters import find_adapters, load_adapters
from smp_runtime.checkpoint.files.atomic_file import read_user_content, user_content_bytes, wrap_content
from smp_runtime.checkpoint.files.manifest import (
    MANIFEST,
    NEWEST,
    PARTIAL,
    USER_CONTENT,
    FoundCheckpoint,
    checkpoints_in,
)
from smp_runtime.checkpoint.files.opened_files import is_plain_name, local_path
from smp_runtime.checkpoint.files.transformers_format import CONFIG, INDEX
from smp_runtime.checkpoint.find_checkpoint import Needed, find_checkpoint
from smp_runtime.checkpoint.folder_lock import LOCK
from smp_runtime.checkpoint.folder_transaction import FolderRemoval
from smp_runtime.checkpoint.live_state import check_random_state, random_file, restore_random_state
from smp_runtime.checkpoint.load_partial import PartialLoad
from smp_runtime.checkpoint.memory.copying import Copier
from smp_runtime.checkpoint.memory.newest import MemoryState, Recovery, newest_state
from smp_runtime.checkpoint.rank_agreement import met_by
from smp_runtime.checkpoint.save_partial import Saver
from smp_runtime.comm.control import host_name
from smp_runtime.data.position import SourcePositions
from smp_runtime.errors import CheckpointError, SMPUserError
from smp_runtime.model.distributed_model import DistributedModel
from smp_runtime.optim.distributed_optimizer import DistributedOptimizer
from smp_runtime.tensors.host_memory.snapshot import wait_for_copies

if TYPE_CHECKING:
    from pathlib import Path

    from smp_runtime.checkpoint.files.reader import CheckpointReader
    from smp_runtime.job.session import Session

logger = logging.getLogger("smp")

#: Bytes that a tag may have: names of files have at most 255, and a save's are longer than its tag.
_LONGEST_TAG = 150


class Resumed(list[str]):
    """Folders from which a job was resumed, one after the other."""

    outlives_regrouping = True


def save_checkpoint(  # noqa: PLR0913 - the documented signature
    session: Session,
    path: str,
    tag: str,
    partial: bool = True,
    model: DistributedModel | None = None,
    optimizer: DistributedOptimizer | None = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    async_save: bool = False,
    trust_user_content: bool = False,
) -> None:
    """Save a checkpoint; every rank calls it with the same tag.

    What the script was given of ``smp.data`` by now counts as trained: a job that resumes goes on behind it.

    A partial checkpoint is the folder ``path/<tag>_partial`` with the model's and the optimizer's state and every
    rank's random state; every rank writes its own part. It appears whole or not at all, and ``path/newest`` names it
    last. It can be resumed with any other degrees and number of processes. A full one (``partial=False``) is the file
    ``path/<tag>``, the model's ``state_dict``, and ``path/<tag>_optimizer``, the optimizer's, both as one process has
    them. If the tag is ``pytorch_model.bin`` or ends in ``.safetensors``, the weights are written as Transformers does,
    in shards with an index when they are large, with ``config.json`` beside them.

    Args:
        path: folder of checkpoints, made if absent.
        tag: usually the number of steps.
        partial: False writes one file of weights, and one of the optimizer.
        model: default: the wrapped model.
        optimizer: default: the wrapped optimizer; none for a full checkpoint of a ``model`` that is given.
        user_content: plain containers, numbers, strings, tensors and NumPy arrays; rank 0's is saved.
        translate_if_full: save a full state of a distributed Hugging Face model under Hugging Face's names.
        num_kept_partial_checkpoints: older ones are removed beyond this number.
        async_save: return as soon as what the script can change is copied to CPU memory; a thread copies the optimizer's
            state, for which the next update waits, and writes all of it while training goes on.
            The next save, :func:`wait_for_checkpoint` and the end of the job wait for it. For partial checkpoints.
        trust_user_content: let ``user_content`` hold any object that can be pickled; it must be trusted when resumed.

    Raises:
        SMPUserError: content that could not be loaded back, a tag with a slash, or one that means another file, or a path
            that is none of this machine, such as ``s3://bucket/x``.
        CheckpointError: some rank could not write, now or in the last asynchronous save, or another job saves there; the
            former checkpoint stays the newest.

    Example:
        >>> smp.save_checkpoint("checkpoints", tag="step-100", user_content={"step": 100})
    """
    tag = str(tag)
    check_tag(tag, partial=partial)
    folder = local_path(path, "path of smp.save_checkpoint")
    if num_kept_partial_checkpoints is not None and num_kept_partial_checkpoints < 1:
        raise SMPUserError(
            f"num_kept_partial_checkpoints is {num_kept_partial_checkpoints}; keep at least 1, or None", code="SMP402"
        )
    if async_save and not partial:
        raise SMPUserError(
            "async_save is for partial checkpoints, but partial is False; leave one of them out", code="SMP402"
        )
    models = _models(session)
    if model is None and len(models) != 1:
        raise SMPUserError(
            f"{len(models)} wrapped models are alive, so it is not clear which one to save: pass model=", code="SMP402"
        )
    chosen = model or models[0]
    if not chosen.partitioned:
        raise SMPUserError(
            "the model was not partitioned yet, so there is nothing to save: its weights get their place in the first step; save "
            "after it",
            code="SMP402",
        )
    if optimizer is None and (partial or model is None):  # a full model that is asked for by itself is one file
        optimizer = _optimizer(session)
    _check_optimizer(optimizer)

    def content(save_id: str | None = None) -> bytes:
        found = (
            user_content
            if save_id is None
            else wrap_content(user_content, save_id, SourcePositions.of(session.ranks).state())
        )
        return user_content_bytes(found, trusted=trust_user_content)

    with current_record().within(SAVE):
        if not partial:
            full.save(session, folder, tag, chosen, optimizer, content, translates=translate_if_full)
            return
        Saver.of(session).save(
            folder / f"{tag}{PARTIAL}",
            tag,
            chosen,
            optimizer,
            content,
            keep=num_kept_partial_checkpoints,
            in_background=async_save,
            has_content=user_content is not None,
        )


def _check_optimizer(optimizer: object) -> None:
    if optimizer is not None and not hasattr(optimizer, "original_groups"):
        raise SMPUserError(
            f"optimizer= is {kind_of(optimizer)}; pass what smp.DistributedOptimizer returned", code="SMP402"
        )


def memory_checkpoint(
    session: Session,
    model: DistributedModel | None = None,
    optimizer: DistributedOptimizer | None = None,
    user_content: Any = None,
) -> bool:
    """Keep the state of the training in shared memory; every rank calls it after each update of the optimizer.

    It does nothing unless the job has ``SMP_MEMORY_CHECKPOINT=1``. Then every rank copies its part of the model's and the
    optimizer's state and its random state into the memory of its host, as often as that takes at most 3 % of the steps' time, or
    every ``SMP_MEMORY_CHECKPOINT_STEPS``. When the launcher starts the ranks again (``SMP_MAX_RESTARTS``),
    ``resume_from_checkpoint`` loads the newest copy that all ranks have. Gradients are not copied.

    Args:
        model: default: the wrapped model.
        optimizer: default: the wrapped optimizer.
        user_content: as for ``save_checkpoint``; rank 0's is kept, and ``resume_from_checkpoint`` returns it.

    Returns:
        Whether this rank has a copy of the state of this moment.

    Raises:
        SMPUserError: content that could not be loaded back, or it is not clear which model is meant.

    Example:
        >>> for step in range(3):
        ...     loss = train_step(model, inputs, targets)
        ...     optimizer.step()
        ...     _ = smp.memory_checkpoint(model, optimizer, user_content={"step": step + 1})
    """
    copier = Copier.of(session)
    if copier is None:
        return False
    models = _models(session)
    if model is None and len(models) != 1:
        raise SMPUserError(
            f"{len(models)} wrapped models are alive, so it is not clear which one to keep: pass model=", code="SMP402"
        )
    chosen, updates = model or models[0], optimizer or _optimizer(session)
    _check_optimizer(updates)
    if not chosen.partitioned:
        return False
    with current_record().within(SAVE):
        return copier.step(chosen, updates, lambda: user_content_bytes(user_content))


def newest_memory_checkpoint(session: Session) -> int | None:
    """Return the optimizer steps of the newest state in memory from which all ranks can resume.

    Every rank calls it.

    Returns:
        None unless the job's ranks were restarted in place and have left such a state. Also None after
        ``resume_from_checkpoint``.

    Example:
        >>> if smp.newest_memory_checkpoint() is not None:
        ...     state = smp.resume_from_checkpoint("checkpoints")
    """
    state = newest_state(session)
    return None if state is None else state.manifest.steps


def wait_for_checkpoint(session: Session) -> None:
    """Return when an asynchronous save is complete and named in ``newest``, and the checkpoints that it replaces are removed.

    Raises:
        CheckpointError: it could not be written; the former checkpoint is still the newest.

    Example:
        >>> smp.save_checkpoint("checkpoints", tag="last", async_save=True)
        >>> smp.wait_for_checkpoint()
    """
    Saver.of(session).wait()
    FolderRemoval.of(session).wait()


def resume_from_checkpoint(
    session: Session,
    path: str,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    trust_user_content: bool = False,
    load_optimizer_states: bool | None = None,
) -> Any:
    """Load a checkpoint into the wrapped model and optimizer; every rank calls it, also before the first step.

    The degrees, the number of processes and the precision may be others than when it was saved. Every file is checked
    against its checksum, and names and shapes against the model, before anything is loaded. With the optimizer's state
    the progress display goes on from the step at which a partial checkpoint was saved, and so does what ``smp.data`` reads.

    The first call after the launcher has started the ranks again (``SMP_MAX_RESTARTS``) loads the newest state that
    ``memory_checkpoint`` has kept, if all ranks have one and the files that are asked for have none that is newer.

    Args:
        path: folder of checkpoints.
        tag: a tag or a folder name; None means the newest, or, if that is damaged or not complete, the last whole one
            before it. For a full checkpoint, its file name; weights of Transformers load too, whole or in shards: the tag is
            ``pytorch_model.bin``, ``model.safetensors``, an index, or a folder in ``path``; so do adapters of PEFT, where
            such a file is not there, or in such a folder.
        partial: which of the two kinds.
        strict: whether names must agree exactly; shapes must in any case.
        load_optimizer: whether the optimizer's state is loaded too.
        load_sharded_optimizer_state: False loads only float32 weights and the loss scale of the optimizer, where sharded
            data parallelism is, or was, on.
        translate_function: applied to a full checkpoint's state before it is loaded.
        trust_user_content: load ``user_content`` even if it holds objects that may run code.
        load_optimizer_states: what ``load_optimizer`` was called in older releases; it wins if it is given.

    Returns:
        The ``user_content`` that was saved, or None.

    Raises:
        CheckpointError: nothing to resume, a file is missing or damaged, or it belongs to another model; nothing was
            loaded.

    Example:
        >>> state = smp.resume_from_checkpoint("checkpoints", tag="step-100")
        >>> state["step"]
        100
    """
    load_optimizer = load_optimizer if load_optimizer_states is None else load_optimizer_states
    folder = local_path(path, "path of smp.resume_from_checkpoint")
    models = _models(session)
    if len(models) != 1:
        raise SMPUserError(
            f"{len(models)} wrapped models are alive, so it is not clear which one to load into: keep a reference to "
            "the one that smp.DistributedModel returned",
            code="SMP402",
        )
    model, optimizer = models[0], _optimizer(session) if load_optimizer else None
    wait_for_copies()  # of an asynchronous save, before anything is written into
    if not partial and (adapters := find_adapters(model, folder, tag)):
        with _raised_on_all(session):
            load_adapters(model, adapters, strict=strict)
        return None
    if not partial:
        return full.resume(
            session,
            folder,
            tag,
            model,
            optimizer,
            translate_function,
            strict=strict,
            trusted=trust_user_content,
            goes_on=load_optimizer,
        )
    session.ranks.keep(Resumed, Resumed).append(path)
    Saver.of(session).wait()
    wants = _Wants(model, optimizer, strict, load_optimizer, load_sharded_optimizer_state, trust_user_content)
    state = newest_state(session)
    if state is not None and not _has_newer(session, folder, tag, state):
        try:
            plan = wants.plan(session, state.checkpoint, state.reader)
            state.reader.bring(session.ranks.control, plan.files())
            content = _load(session, plan, wants)
        except CheckpointError as error:
            if session.ranks.rank == 0:
                logger.warning("%s; resuming from files instead", error)
        else:
            Recovery.of(session).is_loaded(state)
            if session.ranks.rank == 0:
                logger.info("going on from the state in memory, after %d steps", state.manifest.steps)
            return content
    Recovery.of(session).end()
    plans: dict[str, PartialLoad] = {}

    def needs(checkpoint: FoundCheckpoint) -> Needed:
        plan = plans[checkpoint.name] = wants.plan(session, checkpoint)
        return Needed(plan.reader.files, plan.files())

    found = find_checkpoint(session, folder, tag, needs)
    return _load(session, plans[found.name], wants)


@dataclass(frozen=True)
class _Wants:
    """What a script wants of a partial checkpoint; see :func:`resume_from_checkpoint`."""

    model: DistributedModel
    optimizer: DistributedOptimizer | None
    strict: bool
    load_optimizer: bool
    sharded_state: bool
    trusted: bool

    def plan(
        self, session: Session, checkpoint: FoundCheckpoint, reader: CheckpointReader | None = None
    ) -> PartialLoad:
        """Return the plan for loading the checkpoint; raise CheckpointError if it does not fit."""
        sharded = session.ranks.cfg.sharded_data_parallel_degree > 1
        if checkpoint.manifest is not None:
            sharded = sharded or checkpoint.manifest.topology.get("sharded", 1) > 1
        states = self.sharded_state or not sharded
        return PartialLoad(
            session, checkpoint, self.model, self.optimizer, strict=self.strict, states=states, reader=reader
        )


def _load(session: Session, plan: PartialLoad, wants: _Wants) -> Any:
    """Load the planned checkpoint and return the script's content.

    All files are checked before anything is loaded. If a check raises CheckpointError, nothing has changed.
    """
    if (
        wants.load_optimizer
        and wants.optimizer is None
        and plan.manifest.optimizer is not None
        and session.ranks.rank == 0
    ):
        logger.warning(
            "%s has the state of an optimizer, but none was wrapped yet: wrap it before resume_from_checkpoint, or pass "
            "load_optimizer=False",
            plan.folder,
        )
    content: Any = None
    random_state: Any = None
    positions: Any = {}
    with _raised_on_all(session):
        # All that may be wrong with the files' content is found before anything of them is loaded.
        plan.check()
        if USER_CONTENT in plan.manifest.files:
            file = plan.folder / USER_CONTENT
            content = read_user_content(file, trusted=wants.trusted, files=plan.reader.files)
        random_state = plan.reader.content(random_file(session.ranks.rank)) if plan.same_topology else None
        check_random_state(random_state)
        positions = plan.positions() if wants.load_optimizer else {}
        SourcePositions.of(session.ranks).check(positions)
    plan.adopt_partition()
    with _raised_on_all(session):
        plan.load()
        restore_random_state(session, random_state, plan.same_topology)
        SourcePositions.of(session.ranks).load(positions)
    if wants.load_optimizer and plan.manifest.steps:  # else the weights begin a training of their own
        session.progress.set_position(plan.manifest.steps)
    return content


def _has_newer(session: Session, folder: Path, tag: str | None, state: MemoryState) -> bool:
    """Return whether the requested files have a state that this training reached later; rank 0 checks."""
    newer = False
    control = session.ranks.control
    if session.ranks.rank == 0:
        names = None if tag is None else (str(tag), f"{tag}{PARTIAL}")
        saved, steps = state.manifest.saved, state.manifest.steps
        for checkpoint in checkpoints_in(folder):
            manifest = checkpoint.manifest
            is_wanted = names is None or checkpoint.name in names
            if not is_wanted or manifest is None:
                continue
            # An older file may have more steps: the one that this training began with.
            if manifest.steps > steps and manifest.saved >= saved:
                newer = True
    # The folder may look different to other ranks by now, so the first one decides.
    answer: bool = control.broadcast(newer, list(range(control.size)))
    return answer


@contextlib.contextmanager
def _raised_on_all(session: Session) -> Iterator[None]:
    """Raise an error that any rank raises inside the block on every rank at its end; every rank enters."""
    failure: str | None = None
    other: Exception | None = None
    try:
        yield
    except CheckpointError as error:
        failure = str(error)
    except Exception as error:  # report any error, because the other ranks wait for the outcome
        failure, other = f"rank {session.ranks.rank} could not resume: {type(error).__name__}: {error}", error
    everyone = session.ranks.control.allgather(
        (host_name(), failure), session.ranks.topology.group_of(Group.WORLD, session.ranks.rank)
    )
    if other is not None:
        raise other
    for rank, (host, why) in enumerate(everyone):
        if why:
            raise met_by(why, rank, host)


def check_tag(tag: str, *, partial: bool = True) -> None:
    """Check that a tag can be a file name, and is not reserved for another file.

    Args:
        partial: whether the tag is of a partial checkpoint; then it is only part of file names.

    Raises:
        SMPUserError: it cannot, or it is reserved.
    """
    if not tag.isprintable() or not is_plain_name(tag) or tag.startswith("."):
        raise SMPUserError(
            f"the tag is {tag!r}, but it becomes a file name: use letters, digits, '-' and '_'", code="SMP402"
        )
    if len(tag.encode()) > _LONGEST_TAG:
        raise SMPUserError(
            f"the tag {tag[:20]!r}… has {len(tag.encode()):,} bytes, but it becomes part of file names: use at most {_LONGEST_TAG}",
            code="SMP402",
        )
    if _is_reserved(tag, partial=partial):
        raise SMPUserError(
            f"the tag is {tag!r}, which is the name of a file that belongs to checkpoints themselves, and would be taken for it: "
            "use another, such as the number of steps",
            code="SMP402",
        )


def _is_reserved(tag: str, *, partial: bool) -> bool:
    if tag in (NEWEST, MANIFEST):
        return True
    if partial:
        return False
    if tag in (CONFIG, LOCK):
        return True
    is_of_script = tag.startswith(f"{full.USER_CONTENT}_")
    return is_of_script or tag.endswith((PARTIAL, full.OPTIMIZER, INDEX))


def _models(session: Session) -> list[DistributedModel]:
    return [model for model in session.models if isinstance(model, DistributedModel)]


def _optimizer(session: Session) -> DistributedOptimizer | None:
    optimizer = session.optimizer
    return optimizer if isinstance(optimizer, DistributedOptimizer) else None
