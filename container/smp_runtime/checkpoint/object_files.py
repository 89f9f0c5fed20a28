"""``smp.save`` and ``smp.load``: one object, one file per model parallel rank. Never collective."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.serialization import default_restore_location

from smp_config import Group
from smp_config.errors import kind_of
from smp_records import rank_record
from smp_runtime.checkpoint.files.atomic_file import read_tensors, write_tensors
from smp_runtime.checkpoint.files.opened_files import local_path
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session as sessions

if TYPE_CHECKING:
    from smp_runtime.job.session import Session


def partial_suffix(session: Session, *, v3: bool = False) -> str:
    """Return the suffix of this rank's partial file.

    It is ``mp_rank``; ``pp_tp`` with tensor parallelism; or ``pp_tp_rdp``.
    """
    pp, tp, rdp = (session.ranks.rank_in(group) for group in (Group.PP, Group.TP, Group.RDP))
    if v3:
        return f"{pp}_{tp}_{rdp}"
    if session.ranks.size(Group.TP) > 1:
        return f"{pp}_{tp}"
    return str(session.ranks.rank_in(Group.MP))


def save(
    session: Session,
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: ModuleType = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Call ``torch.save(obj, f)``; with ``partial`` the file name ends in ``_`` and :func:`partial_suffix`.

    Of ranks that share sequences out (``smp.cp_size()`` of them) the first one writes, since a script that saves under
    ``smp.dp_rank() == 0`` does so on all of them; with ``v3`` each writes its own file.

    Args:
        obj: tensors and plain containers, numbers and strings, or with ``pickle_module`` anything that it writes.
        f: name of the file; its folder is made if absent.
        partial: one file for each model parallel rank, instead of one with exactly this name.
        pickle_module: the module that writes objects, as for ``torch.save``.
        pickle_protocol: likewise.
        v3: the file name ends in pipeline, tensor and reduced data parallel rank instead.

    Raises:
        CheckpointError: the disk is full; the former file stays.

    Example:
        >>> smp.save(model.state_dict(), "model.pt", partial=False)  # one file, whole
    """
    if session.ranks.rank_in(Group.CONTEXT) and not v3:
        return  # the first rank that shares these sequences has the same object, and the same file name
    path = _path(session, f, "f of smp.save", partial=partial, v3=v3)
    with rank_record.current_record().within(rank_record.SAVE):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(obj, path, pickle_module=pickle_module, pickle_protocol=pickle_protocol)


def load(
    session: Session,
    f: str,
    map_location: Any = None,
    pickle_module: ModuleType | None = None,
    pickle_load_args: Mapping[str, Any] | None = None,
    partial: bool = True,
    back_compat: bool = False,
    v3: bool = False,
    **more: Any,
) -> Any:
    """Load what :func:`save` wrote, or any file of ``torch.save`` with ``partial=False``.

    A ``pickle_module`` means that the file may hold any object and may run code while it loads; without one, only
    tensors and plain objects are read.

    Args:
        f: name of the file, without what ``partial`` appends.
        map_location: as ``torch.load`` takes it. None puts what was saved from a GPU on the device that this rank computes
            on, whichever GPU its writer had, and leaves what was on the CPU there.
        pickle_module: what reads objects, such as ``pickle``.
        pickle_load_args: keywords for the unpickler, as a dictionary or as further keywords.
        partial: the file name ends in ``_`` and this rank's model parallel rank, as with :func:`save`.
        back_compat: has no effect, with a warning: files of all releases are read in the same way.
        v3: the file name ends in pipeline, tensor and reduced data parallel rank, as with ``smp.save(v3=True)``.
        more: further keywords for the unpickler.

    Returns:
        What was saved.

    Raises:
        SMPUserError: a boolean in the place of ``pickle_load_args``.
        CheckpointError: the file is damaged, or holds what only a ``pickle_module`` reads.

    Example:
        >>> weights = smp.load("model.pt", partial=False)
    """
    if isinstance(pickle_load_args, bool):
        raise SMPUserError(
            f"smp.load got {pickle_load_args} as its fourth argument, which is pickle_load_args; name the fifth: "
            f"partial={pickle_load_args}",
            code="SMP402",
        )
    if back_compat:
        sessions.say_once(
            "smp.load(back_compat=True) ignored: files of all releases are read in the same way; leave it out"
        )
    keywords = {**(pickle_load_args or {}), **more}
    if map_location is None:
        map_location = map_to_own_device(session.ranks.device)
    path = _path(session, f, "f of smp.load", partial=partial, v3=v3)
    if pickle_module is None and not keywords:
        return read_tensors(path, map_location)
    return torch.load(path, map_location=map_location, pickle_module=pickle_module, weights_only=False, **keywords)


def map_to_own_device(device: torch.device) -> Callable[[Any, str], Any]:
    """Return a ``map_location`` for ``torch.load`` that moves tensors from any GPU to ``device``."""

    def locate(storage: Any, location: str) -> Any:
        # None leaves the choice to PyTorch, which restores the former place.
        return default_restore_location(storage, str(device)) if location.startswith("cuda") else None

    return locate


def _path(session: Session, f: Any, what: str, *, partial: bool, v3: bool) -> Path:
    """Return the path of this rank's file."""
    if not isinstance(f, str):
        raise SMPUserError(f"the file is given as {kind_of(f)}; pass its name as a string", code="SMP402")
    local_path(f, what)
    return Path(f"{f}_{partial_suffix(session, v3=v3)}" if partial else f)
