"""Whole weights of a live model on their way into files, tensor by tensor; ``save_pretrained`` of wrapped models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_runtime.checkpoint.files.manifest import TensorRecord
from smp_runtime.checkpoint.files.name_translation import Translate, TranslatedTensor, each_once
from smp_runtime.checkpoint.files.opened_files import local_path
from smp_runtime.checkpoint.files.transformers_format import (
    LARGEST_FILE,
    PICKLED,
    SAFETENSORS,
    as_it_is,
    bytes_in,
    config_of,
    write_transformers,
)
from smp_runtime.checkpoint.folder_transaction import refuse_if_any_failed
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session as sessions
from smp_runtime.model import distributed_model
from smp_runtime.model.distributed_model import DistributedModel

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.job.session import Session
    from smp_runtime.job.trained import TrainedModel
    from smp_runtime.model.state_dict import TensorShape

#: Whole tensors by name, without values; and what gives one its values.
Planned = tuple[Mapping[str, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]


def write_streamed(model: DistributedModel, rename: Translate, write: Callable[[Planned], None]) -> None:
    """Call ``write`` on the first rank of the job, while all ranks bring it their parts; all ranks call it.

    Args:
        rename: brings a state under the names that it is written under.
        write: gets every tensor once; it makes them real one after the other, in any order, best in theirs.
    """
    described, stream = model.whole_tensors()
    try:
        if described is not None:
            write(_planned(described, stream, rename))
    finally:
        for _ in stream:  # whatever has failed, the others wait to be rid of theirs
            pass


def _planned(described: list[TensorShape], stream: Iterator[tuple[str, torch.Tensor]], rename: Translate) -> Planned:
    place = {name: number for number, (name, *_) in enumerate(described)}
    leaves = {
        name: TranslatedTensor.leaf(name, TensorRecord(shape, str(dtype).removeprefix("torch.")))
        for name, shape, dtype in described
    }
    renamed = {name: value for name, value in rename(leaves).items() if isinstance(value, TranslatedTensor)}
    # A tensor that is made of several can be written when the last of them is there.
    ordered = sorted(renamed.items(), key=lambda item: max(place[name] for name in item[1].sources))
    tensors = each_once(dict(ordered))
    uses = Counter(name for key in tensors for name in renamed[key].sources)
    here: dict[str, torch.Tensor] = {}

    def make(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, TranslatedTensor):
            return tensor
        while any(name not in here for name in tensor.sources):
            here.update([next(stream)])
        made = tensor.value(here.__getitem__)
        uses.subtract(tensor.sources)
        for name in tensor.sources:
            if not uses[name]:
                del here[name]
        return made

    return tensors, make


# -- save_pretrained ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class PretrainedSaver:
    """``save_pretrained`` of a module that was wrapped, in place of that of its class.

    Copies of the module have their class's again.

    Attributes:
        save: ``save(session, model, directory, **options)``.
    """

    module: nn.Module
    save: Callable[..., None]

    def __call__(self, save_directory: Any, *given: Any, **options: Any) -> None:
        """See :func:`save_pretrained`, or whatever saves such a module."""
        models = sessions.current_session().models if sessions.is_initialized() else []
        model = next((model for model in models if self.module in _before_and_after(model)), None)
        if isinstance(model, DistributedModel):
            self.save(sessions.current_session(), model, save_directory, *given, **options)
        else:
            type(self.module).save_pretrained(self.module, save_directory, *given, **options)  # type: ignore[attr-defined]


def give_save_pretrained(model: DistributedModel) -> None:
    """Let a wrapped module of Transformers save what all ranks have of it; the one that was replaced by it, too."""
    # Where one rank has the whole model, the method of Transformers is right.
    is_spread = _has_distributed_modules(model) or is_split(model)
    if not is_spread:
        if sessions.current_session().ranks.size(Group.CONTEXT) > 1 and hasattr(model.module, "save_pretrained"):
            model.module.__dict__["save_pretrained"] = PretrainedSaver(model.module, _save_for_the_group)
        return
    for module in _before_and_after(model):
        # Those with adapters have a form of their own.
        is_plain = not has_adapters(module)
        if is_plain and config_of(module) is not None:
            module.__dict__["save_pretrained"] = PretrainedSaver(module, save_pretrained)


def _save_for_the_group(
    session: Session, model: DistributedModel, save_directory: Any, *given: Any, **options: Any
) -> None:
    """Save by the method of the module's class, on one of the ranks that share sequences out.

    A script's ``if smp.dp_rank() == 0`` is true on all of them.
    """
    if session.ranks.rank_in(Group.CONTEXT) == 0:
        module: Any = model.module
        type(module).save_pretrained(module, save_directory, *given, **options)


def _before_and_after(model: TrainedModel) -> tuple[nn.Module, ...]:
    """Return the module inside a wrapped model, and the script's, which tensor parallelism may have replaced by it."""
    if not isinstance(model, DistributedModel) or model.blueprint.module is model.module:
        return (model.module,)
    return (model.module, model.blueprint.module)


def is_split(model: DistributedModel) -> bool:
    """Return whether other ranks have parts of the model that this rank does not have."""
    ranks = sessions.current_session().ranks
    has_stages = ranks.size(Group.PP) > 1
    has_shards = ranks.cfg.sharded_data_parallel_degree > 1
    if has_stages or has_shards:
        return True
    return ranks.size(Group.TP) > 1 and _has_distributed_modules(model)


def _has_distributed_modules(model: DistributedModel) -> bool:
    return next(iter(model.distributed_modules()), None) is not None


def refuse_unpartitioned(model: DistributedModel) -> None:
    """Raise SMPUserError while the stages of a pipeline do not know their parts."""
    if not model.partitioned:
        raise SMPUserError(
            "the model was not partitioned yet, so there is nothing to save: its weights get their place in the first step; save "
            "after it",
            code="SMP402",
        )


def has_adapters(module: nn.Module) -> bool:
    """Return whether the module is a PEFT wrapper around a model with adapters."""
    return hasattr(module, "peft_config") and hasattr(module, "save_pretrained")


def save_pretrained(
    session: Session,
    model: DistributedModel,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Mapping[str, Any] | None = None,
    push_to_hub: bool = False,
    max_shard_size: int | str = LARGEST_FILE,
    safe_serialization: bool = True,
    variant: str | None = None,
    **_: Any,
) -> None:
    """Write weights and configuration as Transformers does, for ``from_pretrained``.

    All ranks call it if the model is split over ranks; the first rank of the job writes, tensor by tensor.

    Args:
        save_directory: a folder, made if absent.
        is_main_process: False writes nothing on this rank, which still gives its part.
        state_dict: a whole state to write in place of the model's own; then the ranks do not wait for each other.
        push_to_hub: must be False.
        max_shard_size: of one file, in bytes or as ``"5GB"``.
        safe_serialization: False writes ``pytorch_model.bin``, from a whole state in memory.
        variant: goes into the files' names.

    Raises:
        SMPUserError: before the first step of a pipeline there are no weights, or an option is not supported.
        CheckpointError: the first rank could not write; raised on all.
    """
    if push_to_hub:
        raise SMPUserError(
            "save_pretrained got push_to_hub=True, which a wrapped model cannot do; push the folder afterwards",
            code="SMP402",
        )
    refuse_unpartitioned(model)
    folder = local_path(save_directory, "save_directory of save_pretrained")
    name = SAFETENSORS if safe_serialization else PICKLED
    file = folder / (name if variant is None else f"{name.rsplit('.', 1)[0]}.{variant}.{name.rsplit('.', 1)[1]}")

    def rename(state: Mapping[str, Any]) -> Mapping[str, Any]:
        return session.module_manager.translated(state, model.module)

    def write(planned: Planned) -> None:
        if not is_main_process:
            return
        folder.mkdir(parents=True, exist_ok=True)
        tensors, make = planned
        write_transformers(file, tensors, config_of(model.module), bytes_in(max_shard_size), make)
        generation = getattr(model.module, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(folder)

    if state_dict is not None or not is_split(model):
        state = rename(model.state_dict() if state_dict is None else state_dict)
        write((each_once({name: value for name, value in state.items() if isinstance(value, torch.Tensor)}), as_it_is))
        return
    failure = None
    try:
        write_streamed(model, rename, write)
    except Exception as error:  # report any error, because the other ranks wait for the outcome
        failure = f"{type(error).__name__}: {error}"
    refuse_if_any_failed(session, failure, file)


distributed_model.when_wrapped.append(give_save_pretrained)
