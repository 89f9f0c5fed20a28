"""Full checkpoints: the model, and the optimizer, each in one file, as one process has them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_runtime.checkpoint.files import user_content as user_contents
from smp_runtime.checkpoint.files.save_id import SAVE_ID, new_save_id, refuse_other_saves, unwrapped
from smp_runtime.checkpoint.files.transformers_format import save_ids
from smp_runtime.checkpoint.files.whole_file import write_bytes, write_tensors
from smp_runtime.checkpoint.folder_transaction import refuse_if_any_failed
from smp_runtime.checkpoint.full_optimizer import load_full_state, read_full_state
from smp_runtime.checkpoint.full_weights import plan_weights, write_weights
from smp_runtime.errors import CheckpointError, SMPUserError

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.optim.distributed_optimizer import DistributedOptimizer

logger = logging.getLogger("smp")

USER_CONTENT = "user_content"
#: Follows the tag in the name of the optimizer's file.
OPTIMIZER = "_optimizer"


def save(
    session: Session,
    folder: Path,
    tag: str,
    model: DistributedModel,
    optimizer: DistributedOptimizer | None,
    user_content: Callable[[str], bytes],
    *,
    translates: bool,
) -> None:
    """Write ``<tag>``, ``<tag>_optimizer`` and ``user_content_<tag>``; every rank calls it, rank 0 writes.

    Args:
        user_content: gives the content of its file, with the id of the save in it.
        translates: to the names that the models had before they were distributed.
    """
    failure = None
    try:
        state = model.state_to_save()
        optimizer_state = optimizer.full_state_dict(gather_to_rank0=True) if optimizer is not None else None
        if session.ranks.rank == 0:
            save_id = new_save_id()
            content = user_content(save_id)
            folder.mkdir(parents=True, exist_ok=True)
            if optimizer_state is not None:
                write_tensors({**optimizer_state, SAVE_ID: save_id}, folder / f"{tag}{OPTIMIZER}")
            else:  # of an earlier save
                (folder / f"{tag}{OPTIMIZER}").unlink(missing_ok=True)
            write_bytes(content, folder / f"{USER_CONTENT}_{tag}")
            # The file that is looked for comes last.
            write_weights(session, model, state, folder / tag, translates=translates, save_id=save_id)
    except Exception as error:  # whatever it is, the other ranks wait to be told
        failure = f"{type(error).__name__}: {error}"
    refuse_if_any_failed(session, failure, folder / tag)


def resume(
    session: Session,
    folder: Path,
    tag: str | None,
    model: DistributedModel,
    optimizer: DistributedOptimizer | None,
    translate_function: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None,
    *,
    strict: bool,
    trusted: bool,
) -> Any:
    """Load what :func:`save` wrote, or any file with a ``state_dict``; returns the user content.

    Raises:
        CheckpointError: the file is missing, damaged, or belongs to another model; nothing was loaded.
    """
    if tag is None:
        raise SMPUserError("a full checkpoint is resumed by its file name, but tag is None: pass tag=")
    file = folder / tag
    optimizer_file, content_file = folder / f"{tag}{OPTIMIZER}", folder / f"{USER_CONTENT}_{tag}"
    failure: Exception | None = None
    optimizer_state: dict[str, Any] | None = None
    try:
        plan = plan_weights(session, model, file, translate_function, strict=strict)
        content, save_id = unwrapped(user_contents.read(content_file, trusted=trusted))
        ids = {**save_ids(file), str(content_file): save_id}
        if optimizer is not None and optimizer_file.is_file():
            optimizer_state = read_full_state(optimizer_file, optimizer)
            ids[str(optimizer_file)] = optimizer_state.pop(SAVE_ID, None)
        refuse_other_saves(ids)
    except Exception as error:  # whatever it is, the other ranks must not load either
        failure = error
    said = None if failure is None else f"{type(failure).__name__}: {failure}"
    everyone = session.ranks.control.allgather(said, list(range(session.ranks.control.size)))
    if failure is not None:
        raise failure
    for rank, why in enumerate(everyone):
        if why:
            raise CheckpointError(f"rank {rank} cannot load {file} ({why}); nothing was loaded")
    if optimizer is not None and optimizer_state is None and session.ranks.rank == 0:
        logger.warning(
            "%s has no optimizer state beside it (%s): only the weights are loaded", file, optimizer_file.name
        )
    plan.load()
    if optimizer is not None and optimizer_state is not None:
        load_full_state(model, optimizer, optimizer_state)
    return content
