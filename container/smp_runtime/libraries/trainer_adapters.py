"""Adapters of PEFT in Transformers' ``Trainer``: saved without the frozen base, and resumed from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from smp_runtime.checkpoint.adapters import adapter_state, find_adapters
from smp_runtime.checkpoint.export import has_adapters, is_split
from smp_runtime.checkpoint.save_and_resume import resume_from_checkpoint
from smp_runtime.job import session as sessions
from smp_runtime.libraries.trainer import replace_method
from smp_runtime.model.distributed_model import DistributedModel

#: Says that a folder was saved by this library; Transformers looks for it.
_SAVED_HERE = "user_content.pt"


def adapt_adapters(module: ModuleType) -> None:
    """``Trainer``'s saving and loading, where the wrapped model is one of PEFT."""
    methods: dict[str, Callable[..., Any]] = {
        "save_model": _save_model,
        "_load_from_checkpoint": _load,
        "_save_optimizer_and_scheduler": _without_base,
        "_load_optimizer_and_scheduler": _without_base,
    }
    for name, method in methods.items():
        replace_method(module.Trainer, name, method, module)


def _save_model(
    former: Callable[..., Any], trainer: Any, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    model = trainer.model_wrapped
    if not (isinstance(model, DistributedModel) and has_adapters(model.module) and is_split(model)):
        former(output_dir, _internal_call=_internal_call)
        return
    folder = Path(trainer.args.output_dir if output_dir is None else output_dir)
    state = adapter_state(sessions.current(), model)
    if trainer.args.should_save:
        folder.mkdir(parents=True, exist_ok=True)
        trainer._save(str(folder), state_dict=state)
        (folder / _SAVED_HERE).touch()
    if trainer.args.push_to_hub and not _internal_call:
        trainer.push_to_hub(commit_message="Model save", revision=getattr(trainer.args, "hub_revision", None))


def _without_base(former: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """A checkpoint of adapters is as small as they are: the script makes the frozen base again."""
    model = trainer.model_wrapped
    if not (isinstance(model, DistributedModel) and has_adapters(model.module)):
        return former(*args, **kwargs)
    frozen = {name for record in model.registry if not record.parameter.requires_grad for name in record.names}

    def leave_out(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        if module is model.module:
            for name in frozen:
                state.pop(prefix + name, None)

    handle = model.module.register_state_dict_post_hook(leave_out)
    try:
        return former(*args, **kwargs)
    finally:
        handle.remove()


def _load(former: Callable[..., Any], trainer: Any, resume_from: str, model: Any = None) -> None:
    wrapped = trainer.model_wrapped
    if isinstance(wrapped, DistributedModel) and find_adapters(wrapped, Path(resume_from), None):
        resume_from_checkpoint(sessions.current(), resume_from, partial=False, load_optimizer=False)
    else:
        former(resume_from, model)
