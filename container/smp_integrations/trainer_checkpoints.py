"""Checkpoints of Transformers' ``Trainer``: what it saves for resuming, from all ranks and for any number of them."""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_runtime.checkpoint.adapters import adapter_state, find_adapters
from smp_runtime.checkpoint.export import has_adapters, is_split
from smp_runtime.checkpoint.live_state import random_state, restore_random_state
from smp_runtime.checkpoint.save_and_resume import resume_from_checkpoint, save_checkpoint
from smp_runtime.job import session as sessions
from smp_runtime.model.distributed_model import DistributedModel
from smp_runtime.preemption.automatic import VARIABLE, Automatic, is_wanted
from smp_runtime.preemption.stop_agreement import StopAgreement

if TYPE_CHECKING:
    from smp_runtime.job.session import Session

logger = logging.getLogger("smp")

#: The folder and the tag of what all ranks save of model and optimizer, beside Trainer's own files.
_FOLDER, _TAG = "smp", "state"
_SCHEDULER = "scheduler.pt"
#: File that marks a folder as saved by this library; Transformers looks for it.
_SAVED_HERE = "user_content.pt"
#: The last file of a checkpoint that Trainer resumes.
_COUNTS = "trainer_state.json"


def _state_folder(checkpoint: Any) -> Path | None:
    """Return the folder with the model and optimizer state of all ranks.

    Return None for a checkpoint of another kind, such as plain weights.
    """
    if checkpoint is None:
        return None
    folder = Path(checkpoint) / _FOLDER
    return folder if (folder / f"{_TAG}_partial").is_dir() else None


def save_optimizer_and_scheduler(_: Callable[..., Any], trainer: Any, output_dir: Any) -> None:
    """Save a partial checkpoint with the float32 weights of half precision, and the learning rate scheduler.

    Transformers' own file would have neither these weights nor all shards.
    """
    session = sessions.current_session()
    folder = Path(output_dir)
    with _without_frozen_base(trainer.model_wrapped):
        save_checkpoint(session, str(folder / _FOLDER), _TAG, model=trainer.model_wrapped, optimizer=trainer.optimizer)
    if trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), folder / _SCHEDULER)
    # A rank that goes on may end the job, or read the folder, which must be complete by then.
    session.ranks.control.barrier(session.ranks.members(Group.WORLD))


def load_from_checkpoint(former: Callable[..., Any], trainer: Any, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
    """Load weights alone, or adapters, unless they come with the optimizer's state."""
    if _state_folder(checkpoint) is not None:
        return
    model = trainer.model_wrapped
    if isinstance(model, DistributedModel) and find_adapters(model, Path(checkpoint), None):
        resume_from_checkpoint(sessions.current_session(), str(checkpoint), partial=False, load_optimizer=False)
    else:
        former(checkpoint, *args, **kwargs)


def load_optimizer_and_scheduler(former: Callable[..., Any], trainer: Any, checkpoint: Any) -> None:
    """Load a checkpoint of :func:`save_optimizer_and_scheduler`, with any degrees and number of ranks."""
    folder = _state_folder(checkpoint)
    if folder is None:
        former(checkpoint)
        return
    with _without_frozen_base(trainer.model_wrapped):
        resume_from_checkpoint(sessions.current_session(), str(folder), _TAG)
    scheduler = folder.parent / _SCHEDULER
    if scheduler.is_file():
        trainer.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))


# -- stopping between two steps ----------------------------------------------------------------------------------------


def stop_and_resume(trainer: Any) -> None:
    """Handle stop requests if ``SMP_AUTO_CHECKPOINT=1``.

    After a request, Trainer saves after the same step on all ranks, and exits with status 0.
    """
    if not is_wanted(os.environ):
        return
    from transformers import TrainerCallback

    session = sessions.current_session()
    if (automatic := session.ranks.kept(Automatic)) is not None:
        automatic.leave_to("Trainer saves and resumes with its own count of steps", is_told=False)

    class Stop(TrainerCallback):
        agreement: StopAgreement | None = None
        reason: str | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.agreement is None:
                self.agreement = StopAgreement(session.ranks.control)
                session.at_leave.append(self.agreement.close)
                self.agreement.listen()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.reason = self.reason or (self.agreement.finished_step() if self.agreement is not None else None)
            if self.reason:
                control.should_save = True

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not self.reason:
                return
            # Before the message, which reports that all ranks have saved.
            session.ranks.control.barrier(session.ranks.members(Group.WORLD))
            if session.ranks.rank == 0:
                logger.warning(
                    "stopped by %s after step %d, saved in %s; Trainer goes on from there in a job with that folder",
                    self.reason,
                    state.global_step,
                    args.output_dir,
                )
            raise SystemExit(0)

    trainer.add_callback(Stop())


def train(
    former: Callable[..., Any], trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Resume from the newest checkpoint if ``SMP_AUTO_CHECKPOINT=1`` and the script names no checkpoint."""
    if resume_from_checkpoint is None and is_wanted(os.environ):
        control = sessions.current_session().ranks.control
        resume_from_checkpoint = control.broadcast(_newest(Path(trainer.args.output_dir)), list(range(control.size)))
        if resume_from_checkpoint is not None and control.rank == 0:
            logger.warning("%s=1: Trainer goes on from %s", VARIABLE, resume_from_checkpoint)
    return former(resume_from_checkpoint, *args, **kwargs)


def _newest(folder: Path) -> str | None:
    """Return Trainer's checkpoint with the most steps that has all its files, or None.

    A job that was killed may have left incomplete checkpoints.
    """
    numbers = {}
    for path in folder.glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        if number.isdecimal():
            numbers[int(number)] = path
    for _, path in sorted(numbers.items(), reverse=True):
        is_whole = (path / _COUNTS).is_file() and (path / _FOLDER).is_dir()
        if is_whole:
            return str(path)
    return None


# -- adapters of PEFT --------------------------------------------------------------------------------------------------


def save_model(
    former: Callable[..., Any], trainer: Any, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """Save only the adapters of a model that has them, without gathering the frozen base; save other models as usual."""
    model = trainer.model_wrapped
    if not (isinstance(model, DistributedModel) and has_adapters(model.module) and is_split(model)):
        former(output_dir, _internal_call=_internal_call)
        return
    folder = Path(trainer.args.output_dir if output_dir is None else output_dir)
    state = adapter_state(sessions.current_session(), model)
    if trainer.args.should_save:
        folder.mkdir(parents=True, exist_ok=True)
        trainer._save(str(folder), state_dict=state)
        (folder / _SAVED_HERE).touch()
    if trainer.args.push_to_hub and not _internal_call:
        trainer.push_to_hub(commit_message="Model save", revision=getattr(trainer.args, "hub_revision", None))


@contextlib.contextmanager
def _without_frozen_base(model: Any) -> Iterator[None]:
    """Leave the frozen base out of the state of a model with adapters, inside the block.

    The script creates the base again when it resumes.
    """
    if not (isinstance(model, DistributedModel) and has_adapters(model.module)):
        yield
        return
    frozen = {name for record in model.registry if not record.parameter.requires_grad for name in record.names}

    def leave_out(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in frozen:
            state.pop(prefix + name, None)

    handle = model.module.register_state_dict_post_hook(leave_out)
    try:
        yield
    finally:
        handle.remove()


# -- random numbers ----------------------------------------------------------------------------------------------------


def _random_file(session: Session, folder: Any) -> Path:
    """Return the file for this rank's random state.

    Each rank has its own file, because ranks of one replica draw different numbers. Transformers counts such ranks as one
    process.
    """
    is_alone = session.ranks.size(Group.WORLD) == 1
    return Path(folder) / ("rng_state.pth" if is_alone else f"rng_state_{session.ranks.rank}.pth")


def save_rng_state(_: Callable[..., Any], trainer: Any, output_dir: Any) -> None:
    """Save the random number generators of this rank, including those of tensor parallel layers."""
    import numpy as np

    session = sessions.current_session()
    kind, keys, *rest = np.random.get_state()
    state = {
        **random_state(session),
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], *rest),
        "ranks": session.ranks.size(Group.WORLD),
    }
    file = _random_file(session, output_dir)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, file)


def load_rng_state(_: Callable[..., Any], trainer: Any, checkpoint: Any) -> None:
    """Restore the random number generators; with another number of ranks, each rank keeps its own new ones."""
    import numpy as np

    session = sessions.current_session()
    if checkpoint is None:
        return
    session.progress.set_position(trainer.state.global_step, trainer.state.max_steps)
    file = _random_file(session, checkpoint)
    state = torch.load(file, weights_only=True) if file.is_file() else {}
    size = session.ranks.size(Group.WORLD)
    if state.get("ranks") != size:
        restore_random_state(session, None, same_topology=False)
        return
    restore_random_state(session, state, same_topology=True)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
