"""Full checkpoints: the model, and the optimizer, each in one file, as one process has them."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smp_config.errors import kind_of
from smp_runtime.checkpoint.export import Planned, write_streamed
from smp_runtime.checkpoint.files.atomic_file import (
    SAVE_ID,
    Records,
    map_file,
    marked_state,
    read_user_content,
    refuse_other_saves,
    unwrap_content,
    write_bytes,
    write_tensors,
    write_text,
)
from smp_runtime.checkpoint.files.manifest import FoundCheckpoint
from smp_runtime.checkpoint.files.name_translation import Translate, rename_prefixes
from smp_runtime.checkpoint.files.opened_files import refuse_other_kinds
from smp_runtime.checkpoint.files.transformers_format import (
    CONFIG,
    PICKLED,
    SAFETENSORS,
    config_of,
    files_of,
    is_transformers_name,
    read_weights,
    save_ids,
    weights_of,
    write_transformers,
)
from smp_runtime.checkpoint.folder_transaction import failure_of, refuse_if_any_failed, words_of
from smp_runtime.checkpoint.full.full_loading import (
    FullLoading,
    FullReader,
    WithStates,
    check_has_masters,
    load_full_settings,
)
from smp_runtime.checkpoint.full.full_manifest import (
    FullManifest,
    manifest_name,
    refuse_damaged,
)
from smp_runtime.checkpoint.full.named_optimizer import NamedState, fit_state, with_names
from smp_runtime.checkpoint.full_transaction import finish_at, full_transaction
from smp_runtime.checkpoint.load_partial import PartialLoad
from smp_runtime.checkpoint.rank_agreement import met_by
from smp_runtime.comm.control import host_name
from smp_runtime.data.position import SourcePositions
from smp_runtime.errors import CheckpointError, SMPUserError
from smp_runtime.optim.kinds.expected_state import refuse_state_of_others
from smp_runtime.optim.whole_state import HALF_KEY

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.optim.distributed_optimizer import DistributedOptimizer


logger = logging.getLogger("smp")

USER_CONTENT = "user_content"
#: Follows the tag in the name of the optimizer's file.
OPTIMIZER = "_optimizer"
_FORMER_STAY = "the former files of that tag stay"
#: How often files that another job replaces meanwhile are opened again.
_LOOKS = 10


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
    """Write ``<tag>``, ``<tag>_optimizer`` and ``user_content_<tag>``, all or none; every rank calls it, rank 0 writes.

    Args:
        user_content: gives the content of its file, with the id of the save in it.
        translates: to the names that the models had before they were distributed.
    """
    failure = None
    file = folder / tag

    def renamed(state: Mapping[str, Any]) -> Mapping[str, Any]:
        return session.module_manager.translated(state, model.module) if translates else state

    optimizer_state = None
    try:
        optimizer_state = _state_of(session, model, optimizer, translates=translates)
    except Exception as error:  # report any error, because the other ranks wait for the outcome
        failure = words_of(error)
    # Before weights are gathered: whoever failed would take no part.
    refuse_if_any_failed(session, failure, file, _FORMER_STAY)
    try:

        def write(write_weights: Callable[[Path, str, Records], object]) -> None:
            save_id, records = uuid.uuid4().hex, Records()
            content = user_content(save_id)
            with full_transaction(folder, tag) as transaction:
                writing = transaction.writing
                if optimizer_state is not None:
                    write_tensors({**optimizer_state, SAVE_ID: save_id}, writing / f"{tag}{OPTIMIZER}", records)
                write_bytes(content, writing / f"{USER_CONTENT}_{tag}", records)
                write_weights(writing / tag, save_id, records)
                write_text(FullManifest(save_id, files=records).to_json(), writing / manifest_name(tag))
                transaction.commit([f"{tag}{OPTIMIZER}", *(former.name for former in files_of(file))])

        if is_transformers_name(tag):
            config = config_of(model.module) if translates else None

            def write_planned(planned: Planned) -> None:
                tensors, make = planned
                write(
                    lambda to, save_id, records: write_transformers(
                        to, tensors, config, make=make, save_id=save_id, records=records
                    )
                )

            write_streamed(model, renamed, write_planned)
        else:
            state = model.state_to_save()
            if session.ranks.rank == 0:
                write(lambda to, save_id, records: write_whole(model, renamed, state, to, save_id, records))
    except Exception as error:  # report any error, because the other ranks wait for the outcome
        failure = words_of(error)
    refuse_if_any_failed(session, failure, file, _FORMER_STAY)
    if session.ranks.rank == 0 and tag == PICKLED and weights_of(folder) != file and (folder / SAFETENSORS).exists():
        logger.warning(
            "%s was saved, but Transformers takes %s from the same folder first; save into a folder of its own",
            file.name,
            SAFETENSORS,
        )


def _state_of(
    session: Session, model: DistributedModel, optimizer: DistributedOptimizer | None, *, translates: bool
) -> dict[str, Any] | None:
    """Return the optimizer's full state, on rank 0; every rank calls it."""
    if optimizer is None:
        return None
    state = optimizer.full_state_dict(gather_to_rank0=True)
    return with_names(session, model, optimizer, state, translates=translates)


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
    goes_on: bool = True,
) -> Any:
    """Load what :func:`save` wrote, or any file with a ``state_dict``; returns the user content.

    Args:
        goes_on: whether what ``smp.data`` reads goes on where it was, too.

    Raises:
        CheckpointError: the file is missing, damaged, or belongs to another model; nothing was loaded.
    """
    if tag is None:
        raise SMPUserError("a full checkpoint is resumed by its file name, but tag is None: pass tag=", code="SMP402")
    file = folder / tag
    finished = failure_of(lambda: finish_at(file)) if session.ranks.local_rank == 0 else None
    _refuse_on_all(session, file, None if finished is None else CheckpointError(finished))
    for look in range(1, _LOOKS + 1):
        failure: Exception | None = None
        opened: _Opened | None = None
        positions: Any = {}
        before = _identities(file)
        try:
            opened = _open(session, file, model, optimizer, translate_function, strict=strict, trusted=trusted)
            positions = opened.positions if goes_on else {}
            SourcePositions.of(session.ranks).check(positions)
        except Exception as error:  # whatever it is, the other ranks must not load either
            failure = error
        mine = (_identities(file) != before, opened.save_id if opened is not None else None)
        views = session.ranks.control.allgather(mine, _everyone(session))
        # Of a job that saves meanwhile, ranks may have met different saves.
        differ = any(moved for moved, _ in views) or len({found for _, found in views if found}) > 1
        if differ and look < _LOOKS:
            continue
        if differ and failure is None:
            failure = CheckpointError(
                f"{file} is of different saves on different ranks, or at different times: another job saves it all the time, or "
                "hosts have different files; resume when that job has ended, or copy the files of one save to every host"
            )
        _refuse_on_all(session, file, failure)
        break
    if opened is None:
        raise AssertionError("files that cannot be opened are refused")
    plan, content, optimizer_state = opened.plan, opened.content, opened.optimizer_state
    is_by_name = isinstance(plan, FullLoading)
    optimizer_file = folder / f"{tag}{OPTIMIZER}"
    if optimizer is not None and optimizer_state is None and session.ranks.rank == 0:
        logger.warning(
            "%s has no optimizer state beside it (%s): only the weights are loaded", file, optimizer_file.name
        )
    plan.load()
    if optimizer is not None and optimizer_state is not None and not is_by_name:
        load_full_state(model, optimizer, optimizer_state)
    SourcePositions.of(session.ranks).load(positions)
    return content


@dataclass(frozen=True)
class _Opened:
    """The opened files of a full checkpoint, all of one save.

    Attributes:
        optimizer_state: None if there is none.
        save_id: None for files from elsewhere.
        positions: in data sets; empty if they were not counted.
    """

    plan: PartialLoad
    content: Any
    optimizer_state: dict[str, Any] | None
    save_id: str | None
    positions: Any


def _open(
    session: Session,
    file: Path,
    model: DistributedModel,
    optimizer: DistributedOptimizer | None,
    translate_function: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None,
    *,
    strict: bool,
    trusted: bool,
) -> _Opened:
    """Open the files that belong to ``file``; nothing is loaded. Raises as :func:`resume`."""
    optimizer_file = file.with_name(f"{file.name}{OPTIMIZER}")
    content_file = file.with_name(f"{USER_CONTENT}_{file.name}")
    plan = plan_weights(session, model, file, translate_function, strict=strict)
    content, save_id, positions = unwrap_content(read_user_content(content_file, trusted=trusted))
    weights = save_ids(file)
    ids = {**weights, str(content_file): save_id}
    if any(weights.values()) and content_file.is_file() and content_file.stat().st_size == 0:
        raise CheckpointError(
            f"{content_file} is empty, but the save that wrote {file.name} wrote it: copy it again, or remove it to resume without "
            "user content"
        )
    optimizer_state: dict[str, Any] | None = None
    refuse_other_kinds(optimizer_file)
    if optimizer is not None and optimizer_file.is_file():
        optimizer_state = read_full_state(optimizer_file)
        ids[str(optimizer_file)] = optimizer_state.pop(SAVE_ID, None)
        values = optimizer_state["state"].values()
        refuse_state_of_others(
            optimizer.optimizer, optimizer_state["param_groups"], values, f"the file {optimizer_file}"
        )
        found = fit_state(session, model, optimizer, optimizer_state, str(optimizer_file))
        if isinstance(found, NamedState):
            with_states = WithStates(optimizer, found, str(optimizer_file))
            plan = plan_weights(session, model, file, translate_function, strict=strict, states=with_states)
        else:
            optimizer_state = found
    refuse_other_saves(ids)
    save = next((found for found in ids.values() if found), None)
    if session.ranks.local_rank == 0:  # once on every host
        refuse_damaged(file, save, {CONFIG} if optimizer is not None else {CONFIG, optimizer_file.name})
    return _Opened(plan, content, optimizer_state, save, positions)


def _identities(file: Path) -> dict[str, tuple[int, ...]]:
    """Return device, inode, size and time of each file that :func:`_open` may read.

    A file that is replaced in the meantime changes them.
    """
    found = weights_of(file)
    names = {*files_of(file), *(files_of(found) if found is not None else ())}
    names |= {file.with_name(f"{file.name}{OPTIMIZER}"), file.with_name(f"{USER_CONTENT}_{file.name}")}
    names.add(file.with_name(manifest_name(file.name)))
    about: dict[str, tuple[int, ...]] = {}
    for each in names:
        with contextlib.suppress(OSError):
            now = each.stat()
            about[str(each)] = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)
    return about


def _refuse_on_all(session: Session, file: Path, failure: Exception | None) -> None:
    """Raise on every rank what any of them has met; all ranks call it."""
    failed = None if failure is None else f"{type(failure).__name__}: {failure}"
    # Ranks that could load the file wait here too, and fail with the others.
    by_rank = session.ranks.control.allgather((host_name(), failed), _everyone(session))
    if failure is not None:
        raise failure
    for rank, (host, why) in enumerate(by_rank):
        if why:
            raise met_by(f"rank {rank} cannot load {file} ({why}); nothing was loaded", rank, host)


def _everyone(session: Session) -> list[int]:
    return list(range(session.ranks.control.size))


def write_whole(
    model: DistributedModel,
    renamed: Translate,
    state: Mapping[str, Any],
    file: Path,
    save_id: str | None,
    records: Records | None = None,
) -> None:
    """Write a whole state with all of its names as a file of ``torch.save``, on one rank.

    Args:
        renamed: brings it under the names that it is written under.
        state: from ``model.state_dict()``.
        file: its folder exists.
        records: takes the file's length and checksum.
    """
    # Gathered from several ranks, the names of a tied weight do not share memory any more.
    first_of = {name: record.name for record in model.registry for name in record.names}
    state = {name: state.get(first_of.get(name, name), value) for name, value in state.items()}
    whole = renamed(state)
    on_cpu: dict[int, torch.Tensor] = {}  # by tensor, so that tied ones stay one
    for value in whole.values():
        if isinstance(value, torch.Tensor):
            on_cpu[id(value)] = value.detach().cpu()
    content = {name: on_cpu.get(id(value), value) for name, value in whole.items()}
    write_tensors(marked_state(content, save_id), file, records)


def plan_weights(
    session: Session,
    model: DistributedModel,
    path: Path,
    translate: Translate | None = None,
    *,
    strict: bool = True,
    states: WithStates | None = None,
) -> PartialLoad:
    """Check full weights for a model of any topology, and return a plan with ``load()`` to load them.

    Files are mapped and read tensor by tensor; each rank copies its own part.

    Args:
        path: a file of ``torch.save`` or of safetensors, an index of shards, or a folder of Transformers.
        translate: applied to the state first.
        strict: whether the names must agree exactly.
        states: of the optimizer, which is loaded as well.

    Raises:
        CheckpointError: a file is missing or damaged, or it is of another model.
    """
    state: Mapping[str, Any] = read_weights(path)
    if translate is not None:
        state = translate(state)
    reader = FullReader(path, rename_prefixes(state, model.module), model)
    checkpoint = FoundCheckpoint(path.name, path, reader.manifest)
    if states is None:
        return PartialLoad(session, checkpoint, model, None, strict=strict, states=False, reader=reader)
    moved = {former: name for name, former in rename_prefixes({name: name for name in state}, model.module).items()}
    reader.add_states(states, moved)
    return FullLoading(session, checkpoint, model, states, strict=strict, reader=reader)


def read_full_state(file: Path) -> dict[str, Any]:
    """Read a file of an optimizer's full state and leave its tensors on the disk.

    Raises:
        CheckpointError: it is damaged.
    """
    state = map_file(file)
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(groups, list) or not isinstance(state.get("state"), Mapping):
        raise CheckpointError(
            f"{file} holds no state of an optimizer, but {kind_of(state)} without 'state' and 'param_groups'; save "
            "optimizer.state_dict(), or pass load_optimizer=False"
        )
    return dict(state)


def load_full_state(model: DistributedModel, optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> None:
    """Load what :func:`read_full_state` gave, after the weights: what belongs to parameters as soon as these have a place.

    Settings of groups and the loss scale are loaded now, so that what the script sets afterwards stays.
    """
    if model.partitioned:
        optimizer.load_state_dict(state)
        return
    load_full_settings(optimizer, state)
    half = {key: value for key, value in (state.get(HALF_KEY) or {}).items() if key != "loss_scaler"}

    def load() -> None:
        check_has_masters(model, optimizer)
        numbers = _numbers_by_group(optimizer, state)
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": members}
            for group, members in zip(optimizer.param_groups, numbers, strict=True)
        ]
        optimizer.load_state_dict({**state, "param_groups": groups, **({HALF_KEY: half} if half else {})})

    model.load_when_partitioned(load)


def _numbers_by_group(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> list[list[int]]:
    """Return the parameters' numbers of each group: the saved ones, then new ones for groups added since the load."""
    numbers = [list(saved["params"]) for saved in state["param_groups"]]
    known: list[int] = []
    for members in numbers:
        known += members
    following = 1 + max(known, default=-1)
    for added in optimizer.original_groups()[len(numbers) :]:
        numbers.append(list(range(following, following + len(added))))
        following += len(added)
    return numbers
