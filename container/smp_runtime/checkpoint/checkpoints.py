"""``save_checkpoint`` and ``resume_from_checkpoint``: model, optimizer, random state and the script's own content."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_runtime.checkpoint.files import read_tensors, write_tensors, write_user_content
from smp_runtime.checkpoint.folder import FolderTransaction, agree_on_folder, prune, refuse_if_any_failed
from smp_runtime.checkpoint.objects import partial_suffix
from smp_runtime.errors import SMPUserError
from smp_runtime.pipeline.assignment import Assignment
from smp_runtime.session import Session

if TYPE_CHECKING:
    from smp_runtime.model import DistributedModel
    from smp_runtime.optimizer import DistributedOptimizer

logger = logging.getLogger("smp")

USER_CONTENT = "user_content"
#: Which stage has which module, so that every rank finds its own part again.
PARTITION = "partition.json"
PARTIAL_KEY = "_smp_is_partial"


def save_checkpoint(
    session: Session,
    path: str,
    tag: str,
    partial: bool = True,
    model: DistributedModel | None = None,
    optimizer: DistributedOptimizer | None = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Save a checkpoint; every rank calls it with the same tag.

    A partial checkpoint is the folder ``path/<tag>_partial`` with the model's and the optimizer's state and every
    rank's random state; it appears whole or not at all, and ``path/newest`` names it last. A full one
    (``partial=False``) is the file ``path/<tag>``: the model's ``state_dict``, to be loaded by plain PyTorch.

    Args:
        path: folder of checkpoints, made if absent.
        tag: usually the number of steps.
        model: default: the wrapped model.
        optimizer: default: the wrapped optimizer.
        user_content: plain containers, numbers, strings and tensors.
        translate_if_full: save a full state of a distributed Hugging Face model under Hugging Face's names.
        num_kept_partial_checkpoints: older ones are removed beyond this number.

    Raises:
        SMPUserError: content that could not be loaded back, a tag with a slash.
        CheckpointError: some rank could not write; the former checkpoint stays the newest.
    """
    tag = str(tag)
    if not tag or "/" in tag or tag.startswith("."):
        raise SMPUserError(f"the tag is {tag!r}, but it becomes a file name: use letters, digits, '-' and '_'")
    if num_kept_partial_checkpoints is not None and num_kept_partial_checkpoints < 1:
        raise SMPUserError(f"num_kept_partial_checkpoints is {num_kept_partial_checkpoints}; keep at least 1, or None")
    if model is None and len(session.models) != 1:
        raise SMPUserError(
            f"{len(session.models)} wrapped models are alive, so it is not clear which one to save: pass model="
        )
    model = model or session.model
    optimizer = optimizer or session.optimizer
    folder = Path(path)
    if not partial:
        _save_full(session, folder, tag, model, user_content, translate_if_full)
        return
    transaction = FolderTransaction(session, folder / f"{tag}_partial")
    failure = None
    try:
        _write_partial(session, transaction, model, optimizer, user_content)
    except Exception as error:  # whatever it is, the other ranks wait to be told
        failure = f"{type(error).__name__}: {error}"
    transaction.commit(failure)
    if transaction.keeps_order and num_kept_partial_checkpoints is not None:
        prune(folder, num_kept_partial_checkpoints, f"{tag}_partial")


def _write_partial(
    session: Session,
    transaction: FolderTransaction,
    model: DistributedModel | None,
    optimizer: DistributedOptimizer | None,
    user_content: Any,
) -> None:
    folder = transaction.writing
    suffix = partial_suffix(session)
    # With sharded state both are gathered, so all ranks take part and one of each replica writes.
    optimizer_state = optimizer.stage_state() if optimizer is not None else None
    fp16_states = optimizer.fp16_states() if optimizer is not None else None
    # One replica writes, and on hosts with folders of their own each folder gets a copy to resume from.
    writes = session.rank_in(Group.RDP) == 0 or transaction.keeps_order
    gathers = model is not None and model.shards is not None
    module_state = model.local_state_dict() if model is not None and (writes or gathers) else None
    if writes:
        if module_state is not None:
            write_tensors({"module": module_state}, folder / f"model_{suffix}.pt")
        if optimizer_state is not None:
            write_tensors(optimizer_state, folder / f"optimizer_{suffix}.pt")
        if fp16_states:
            write_tensors(fp16_states, folder / f"fp16_states_{suffix}.pt")
    write_tensors(_random_state(session), folder / f"rng_{session.rank}.pt")
    if model is not None and model.assignment is not None and transaction.keeps_order:
        model.assignment.save(folder / PARTITION)
    if transaction.keeps_order:
        write_user_content(user_content, folder / f"{USER_CONTENT}.pt")


def _save_full(
    session: Session, folder: Path, tag: str, model: DistributedModel | None, user_content: Any, translates: bool
) -> None:
    if model is None:
        raise AssertionError("save_checkpoint has checked that there is a model")
    failure = None
    try:
        state = model.state_dict(gather_to_rank0=True)
        if session.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            write_user_content(user_content, folder / f"{USER_CONTENT}_{tag}")
            write_tensors(session.module_manager.translated(state) if translates else state, folder / tag)
    except Exception as error:  # whatever it is, the other ranks wait to be told
        failure = f"{type(error).__name__}: {error}"
    refuse_if_any_failed(session, failure, folder / tag)


def resume_from_checkpoint(
    session: Session,
    path: str,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> Any:
    """Load a checkpoint into the wrapped model and optimizer; every rank calls it.

    Args:
        path: folder of checkpoints.
        tag: a tag or a folder name; None means the newest. For a full checkpoint, its file name.
        partial: which of the two kinds.
        strict: whether the names must agree exactly.
        load_optimizer: whether the optimizer's state is loaded too.
        load_sharded_optimizer_state: only matters under sharded data parallelism.
        translate_function: applied to a full checkpoint's state before it is loaded.

    Returns:
        The ``user_content`` that was saved, or None.

    Raises:
        CheckpointError: nothing to resume, or a file is missing or damaged.
    """
    if len(session.models) != 1:
        raise SMPUserError(
            f"{len(session.models)} wrapped models are alive, so it is not clear which one to load into: keep a reference to "
            "the one that smp.DistributedModel returned"
        )
    model, optimizer = session.model, session.optimizer
    folder = Path(path)
    if not partial:
        return _resume_full(session, folder, tag, strict, translate_function)
    found = agree_on_folder(session, folder, tag)
    suffix = partial_suffix(session)
    if model is not None and not model.partitioned and (found / PARTITION).is_file():
        model.adopt(Assignment.load(found / PARTITION))
    if model is not None:
        model.load_state_dict(read_tensors(found / f"model_{suffix}.pt")["module"], strict=strict)
    if optimizer is not None and load_optimizer:
        optimizer.load_state_dict(read_tensors(found / f"optimizer_{suffix}.pt"))
        if (half := found / f"fp16_states_{suffix}.pt").is_file():
            optimizer.load_fp16_states(read_tensors(half))
    _restore_random_state(session, found)
    content = found / f"{USER_CONTENT}.pt"
    return read_tensors(content) if content.is_file() else None


def _resume_full(
    session: Session,
    folder: Path,
    tag: str | None,
    strict: bool,
    translate_function: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None,
) -> Any:
    if tag is None:
        raise SMPUserError("a full checkpoint is resumed by its file name, but tag is None: pass tag=")
    state = read_tensors(folder / tag)
    if translate_function is not None:
        state = translate_function(state)
    if session.model is None:
        raise SMPUserError("there is no wrapped model to load into; wrap it in smp.DistributedModel first")
    session.model.load_state_dict(state, strict=strict)
    content = folder / f"{USER_CONTENT}_{tag}"
    return read_tensors(content) if content.is_file() else None


def _random_state(session: Session) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if session.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(session.device)
    return state


def _restore_random_state(session: Session, folder: Path) -> None:
    """Each rank continues its own random numbers; with another number of ranks, those without a record start anew."""
    file = folder / f"rng_{session.rank}.pt"
    if not file.is_file():
        logger.warning("no random state for rank %d in %s: it keeps its own", session.rank, folder)
        return
    state = read_tensors(file)
    torch.set_rng_state(state["cpu"])
    if session.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], session.device)
