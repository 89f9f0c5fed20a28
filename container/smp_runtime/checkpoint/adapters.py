"""Adapters of a wrapped model of PEFT: saved whole, from wherever the ranks have their parts, and loaded again."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.checkpoint.export import PretrainedSaver, has_adapters, is_split, refuse_unpartitioned
from smp_runtime.checkpoint.files.manifest import TensorRecord
from smp_runtime.checkpoint.files.name_translation import TranslatedTensor
from smp_runtime.checkpoint.files.opened_files import local_path
from smp_runtime.checkpoint.folder_transaction import refuse_if_any_failed
from smp_runtime.errors import CheckpointError, SMPUserError
from smp_runtime.model import distributed_model

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.model.state_dict import TensorShape

#: What PEFT calls its files.
_FILES = ("adapter_model.safetensors", "adapter_model.bin")


def give_save_adapters(model: DistributedModel) -> None:
    """Let a wrapped model of PEFT save its adapters."""
    module = model.module
    if not has_adapters(module):
        return
    has_distributed_modules = next(iter(model.distributed_modules()), None) is not None
    if has_distributed_modules or is_split(model):
        module.__dict__["save_pretrained"] = PretrainedSaver(module, save_adapters)


def save_adapters(
    session: Session,
    model: DistributedModel,
    save_directory: str | Path,
    safe_serialization: bool = True,
    selected_adapters: list[str] | None = None,
    save_embedding_layers: str | bool = "auto",
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    path_initial_model_for_weight_conversion: str | None = None,
    **options: Any,
) -> None:
    """Write the adapters as PEFT does, for ``PeftModel.from_pretrained``.

    All ranks call it if the model is split over ranks; the first rank of the job writes. Only the tensors that
    PEFT saves are gathered: adapters, ``modules_to_save``, and embeddings if it wants them.

    Args:
        save_directory: a folder, made if absent.
        safe_serialization: False writes ``adapter_model.bin``.
        selected_adapters: their names; None means all.
        save_embedding_layers: as in PEFT.
        is_main_process: False writes nothing on this rank, which still sends its part.
        state_dict: a whole state to write from; then the ranks do not wait for each other.
        path_initial_model_for_weight_conversion: as in PEFT; only if this rank has the whole model.
        options: more of PEFT's.

    Raises:
        SMPUserError: before the first step of a pipeline there are no weights; or adapters are to be converted,
            but this rank has only a part of them.
        CheckpointError: the first rank could not write; raised on all.
    """
    module: Any = model.module
    folder = local_path(save_directory, "save_directory of save_pretrained")
    settings = {
        "safe_serialization": safe_serialization,
        "selected_adapters": selected_adapters,
        "save_embedding_layers": save_embedding_layers,
        **options,
    }

    def write(state: dict[str, Any] | None, **more: Any) -> None:
        state_given = {} if state is None else {"state_dict": state}
        with _reading(model):
            type(module).save_pretrained(
                module, str(folder), is_main_process=is_main_process, **settings, **state_given, **more
            )

    if state_dict is not None or not is_split(model):
        write(state_dict, path_initial_model_for_weight_conversion=path_initial_model_for_weight_conversion)
        return
    if path_initial_model_for_weight_conversion is not None:
        raise SMPUserError(
            "save_pretrained got path_initial_model_for_weight_conversion, but this rank has only a part of the model, and the "
            "conversion needs all of it: save without it, and convert the saved adapters in one process",
            code="SMP402",
        )
    state, failure = adapter_state(session, model, selected_adapters, save_embedding_layers), None
    if state is not None:
        try:
            write(state)
        except Exception as error:  # report any error, because the other ranks wait for the outcome
            failure = f"{type(error).__name__}: {error}"
    refuse_if_any_failed(session, failure, folder)


def adapter_state(
    session: Session,
    model: DistributedModel,
    selected: list[str] | None = None,
    save_embedding_layers: str | bool = "auto",
) -> dict[str, Any] | None:
    """Return the state that PEFT saves: on the first rank of the job; other ranks get None.

    All ranks call it.

    Args:
        selected: names of adapters; None means all.
        save_embedding_layers: as in PEFT.

    Raises:
        SMPUserError: before the first step of a pipeline there are no weights.
    """
    refuse_unpartitioned(model)
    described, stream = model.whole_tensors(_wanted(session, model, selected, save_embedding_layers))
    state = dict(stream)
    if described is None:
        return None
    return {alias: state[name] for alias, name in _aliases(model, state).items()}


def _wanted(
    session: Session, model: DistributedModel, selected: list[str] | None, save_embedding_layers: str | bool
) -> frozenset[str]:
    """Return the tensors that PEFT saves, by their names in the wrapped model; all ranks call it."""
    described, _ = model.whole_tensors()
    names, failure = None, None
    if described is not None:
        try:
            names = _taken(model, described, selected, save_embedding_layers)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    control = session.ranks.control
    names, failure = control.broadcast((names, failure), list(range(control.size)))
    if names is None:
        raise SMPUserError(
            f"the adapters cannot be saved, since PEFT could not say what belongs to them: {failure}; check the arguments of "
            "save_pretrained",
            code="SMP402",
        )
    return frozenset(names)


def _taken(
    model: DistributedModel, described: list[TensorShape], selected: list[str] | None, save_embedding_layers: str | bool
) -> set[str]:
    """Return the names of the tensors that PEFT selects, by tracing placeholders without values."""
    from peft import get_peft_model_state_dict

    module: Any = model.module
    leaves = {
        name: TranslatedTensor.leaf(name, TensorRecord(shape, str(dtype).removeprefix("torch.")))
        for name, shape, dtype in described
    }
    state: dict[str, Any] = {alias: leaves[name] for alias, name in _aliases(model, leaves).items()}
    names: set[str] = set()
    for adapter in module.peft_config if selected is None else selected:
        with _reading(model):
            chosen = get_peft_model_state_dict(
                module, state_dict=dict(state), adapter_name=adapter, save_embedding_layers=save_embedding_layers
            )
        past = [n for n, v in chosen.items() if isinstance(v, torch.Tensor) and not isinstance(v, TranslatedTensor)]
        if past and (model.shards is not None or model.pipeline is not None):
            raise SMPUserError(
                f"it reads {past[0]!r} of adapter {adapter!r} from the module itself, of which this rank has only a part; save "
                "such adapters with smp.save_checkpoint, or train them with data parallelism only",
                code="SMP402",
            )
        names |= {name for value in chosen.values() if isinstance(value, TranslatedTensor) for name in value.sources}
    return names


def _reading(model: DistributedModel) -> contextlib.AbstractContextManager[None]:
    """Let PEFT read names and shapes from the module's state inside the block, while the values are sharded."""
    return model.shards.reading_state() if model.shards is not None else contextlib.nullcontext()


def _aliases(model: DistributedModel, names: Collection[str]) -> dict[str, str]:
    """Return a tensor's first name by each of its names, in the order of the model's state."""
    first = {alias: record.name for record in model.registry for alias in record.names}
    order = model.module.state_dict(keep_vars=True)
    return {alias: name for alias in order if (name := first.get(alias, alias)) in names}


# -- loading -----------------------------------------------------------------------------------------------------------


def find_adapters(model: DistributedModel, folder: Path, tag: str | None) -> dict[str, Path]:
    """Return the folders of the model's adapters that PEFT has saved, by adapter name.

    The result is empty if ``tag`` names a file.

    Args:
        tag: a folder in ``folder``, or the name that a file of all weights would have.
    """
    if not has_adapters(model.module):
        return {}
    place = _folder_of(folder, tag)
    if place is None:
        return {}
    adapters: Any = model.module.peft_config
    # PEFT saves the adapter "default" in the folder itself, and others in folders below.
    paths = {name: place if name == "default" else place / name for name in adapters}
    found = {name: path for name, path in paths.items() if _has_file(path)}
    is_single = len(paths) == 1
    has_other_name = is_single and not found
    if has_other_name and _has_file(place):
        return dict.fromkeys(paths, place)  # whatever it was called when it was saved
    return found


def _folder_of(folder: Path, tag: str | None) -> Path | None:
    """Return the folder that a tag means; None if it names a file of all weights."""
    if tag is None:
        return folder
    tagged = folder / tag
    if tagged.is_file():
        return None
    return tagged if tagged.is_dir() else folder


def _has_file(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def load_adapters(model: DistributedModel, places: Mapping[str, Path], *, strict: bool) -> None:
    """Load adapters that PEFT has saved; what is trained and what is frozen stays so.

    Args:
        places: their folders, by name.
        strict: whether names must agree exactly; shapes must in any case.

    Raises:
        CheckpointError: they belong to other adapters than the model has.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    module: Any = model.module
    for adapter, folder in places.items():
        given: list[str] = []

        def load(state: Mapping[str, Any], strict: bool = False, given: list[str] = given) -> Any:
            del module.__dict__["load_state_dict"]  # the wrapper calls that of the class
            given.extend(state)
            return model.load_state_dict(state, strict=False)

        # PEFT translates its names into the model's. Only the wrapper knows the places of the parts, so it loads them.
        module.__dict__["load_state_dict"] = load
        try:
            with _reading(model):
                set_peft_model_state_dict(module, load_peft_weights(str(folder), device="cpu"), adapter_name=adapter)
        finally:
            module.__dict__.pop("load_state_dict", None)
        if strict:
            _refuse_others(model, adapter, folder, set(given))


def _refuse_others(model: DistributedModel, adapter: str, folder: Path, given: set[str]) -> None:
    names = set(model.module.state_dict(keep_vars=True))
    own = {name for name in names if f".{adapter}." in f"{name}."}
    missing, unexpected = sorted(own - given), sorted(given - names)
    if missing or unexpected:
        raise CheckpointError(
            f"the adapters in {folder} are not those of {adapter!r} in this model: missing {missing[:3]} of {len(missing)}, "
            f"unexpected {unexpected[:3]} of {len(unexpected)}; make the model with the LoraConfig that they were saved with, or "
            "pass strict=False"
        )


distributed_model.when_wrapped.append(give_save_adapters)
