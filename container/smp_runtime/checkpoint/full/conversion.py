"""Whole weights out of a checkpoint of any topology, or out of files of full weights, written in another form."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from smp_config.errors import kind_of
from smp_runtime.checkpoint.files.atomic_file import write_tensors
from smp_runtime.checkpoint.files.manifest import MODULE, PARTIAL, Manifest
from smp_runtime.checkpoint.files.name_translation import (
    TranslatedTensor,
    each_once,
    names_of_each,
    record_of,
    translations_to_theirs,
)
from smp_runtime.checkpoint.files.reader import CheckpointReader
from smp_runtime.checkpoint.files.transformers_format import (
    CONFIG,
    INDEX,
    LARGEST_FILE,
    SAFETENSORS,
    read_weights,
    save_ids,
    weights_of,
    write_transformers,
)
from smp_runtime.checkpoint.full.full_manifest import refuse_damaged
from smp_runtime.checkpoint.full_transaction import finish_at
from smp_runtime.errors import SMPUserError

#: A parameter of a distributed model has this in its name.
_DISTRIBUTED = "seq_layers."


@dataclass
class Weights:
    """Complete weights that can be written.

    Attributes:
        tensors: each once, by its first name; without values.
        config: of the model, if it is one of Transformers.
        translations: kinds of distributed models; ``tensors`` has the names of these models.
    """

    tensors: dict[str, TranslatedTensor]
    value: Callable[[str], torch.Tensor]
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    translations: Sequence[str] = ()


def full_weights(path: Path, config: str | None) -> Weights | None:
    """Return the contents of a file of full weights or a Transformers folder; None if ``path`` is neither.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    if path.is_dir() and _is_of_another_kind(path):
        return None
    # A save that was killed while it moved its files to their names is completed before it is read.
    finish_at(path)
    if not path.exists():
        return None
    _refuse_damaged(path)
    state = {name: value for name, value in read_weights(path).items() if isinstance(value, torch.Tensor)}
    names = names_of_each(state)
    folder = path if path.is_dir() else path.parent
    found = read_config(config, folder)
    family = str((found or {}).get("model_type", "")).replace("_", "")  # as the family's file is called
    are_distributed = any(_DISTRIBUTED in name for name in state)
    return Weights(
        {first: TranslatedTensor.leaf(first, record_of(state[first])) for first, *_ in names},
        state.__getitem__,
        {first: tuple(others) for first, *others in names},
        found,
        [family] if family and are_distributed else [],
    )


def _refuse_damaged(path: Path) -> None:
    """Compare the files of weights in a full checkpoint, or in each of a folder, with the checksums that their save has left."""
    found = weights_of(path)
    if found is None:
        return
    save = next((each for each in save_ids(found).values() if each), None)
    file = found.with_name(found.name.removesuffix(INDEX))  # as it was saved
    refuse_damaged(file, save, {CONFIG, f"{file.name}_optimizer", f"user_content_{file.name}"})


def _is_of_another_kind(folder: Path) -> bool:
    """Return whether a folder is or has partial checkpoints, or is no folder of Transformers."""
    if folder.name.endswith(PARTIAL):
        return True
    has_partial = any(folder.glob(f"*{PARTIAL}"))
    return has_partial or weights_of(folder) is None


def assemble_weights(folder: Path, manifest: Manifest, config: str | None, dtype: str | None) -> Weights:
    """Return the weights of a partial checkpoint.

    Args:
        config: file with the model's configuration; default: the one in the checkpoint.
        dtype: the type they will be converted to; then float32 weights are preferred to rounded ones.
    """
    reader = CheckpointReader(folder, manifest)
    records = {**manifest.parameters, **manifest.buffers}

    def value(name: str) -> torch.Tensor:
        exact = dtype is not None or not reader.holds(MODULE, name)
        whole = reader.whole(reader.weight_key(name) if exact else MODULE, name)
        return whole if dtype is not None else whole.to(getattr(torch, records[name].dtype))

    return Weights(
        {name: TranslatedTensor.leaf(name, record) for name, record in records.items()},
        value,
        {name: record.aliases for name, record in records.items()},
        read_config(config, folder),
        manifest.translations,
    )


def write(
    source: Weights, target: Path, form: str, *, dtype: str | None = None, largest_file: int = LARGEST_FILE
) -> tuple[list[Path], int]:
    """Write ``source`` as ``"transformers"`` (a folder), ``"safetensors"`` or ``"full"`` (a file).

    Returns:
        The files of weights, and their number of tensors. With ``"full"`` a tensor counts once for each of its
        names.

    Raises:
        SMPUserError: the model's configuration is unknown, or the format does not have one of the types.
    """
    translated = translate(source, dtype)

    def make(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.value(source.value) if isinstance(tensor, TranslatedTensor) else tensor

    if form == "transformers":
        if source.config is None:
            raise SMPUserError(
                f"{target} would have no {CONFIG}: the checkpoint was saved without one, because the wrapped module is no model "
                "of Transformers; pass --config with the config.json of the model, or use --to safetensors",
                code="SMP402",
            )
        weights = each_once(translated)
        return write_transformers(target / SAFETENSORS, weights, source.config, largest_file, make), len(weights)
    if form == "safetensors":
        if target.suffix != ".safetensors":  # the name decides on the form of the file
            raise SMPUserError(
                f"OUT is {target}; a file of safetensors has a name that ends in .safetensors: add it", code="SMP402"
            )
        weights = each_once(translated)
        return write_transformers(target, weights, None, 2**62, make), len(weights)
    whole = make_whole(source, translated)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(whole, target)
    return [target], len(whole)


def translate(source: Weights, dtype: str | None) -> dict[str, Any]:
    """Return the tensors under the names that they are written under, without values, and of the type that is wanted."""
    translated: dict[str, Any] = dict(source.tensors)
    for rename in translations_to_theirs(source.translations):
        translated = dict(rename(translated))
    if dtype is None:
        return translated
    kind = getattr(torch, dtype)
    for name, value in translated.items():
        if value.is_floating_point():
            translated[name] = value.to(kind)
    return translated


def make_whole(source: Weights, translated: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return all tensors with their values, under each of their names."""
    whole = {}
    for name, value in translated.items():
        has_no_values = isinstance(value, TranslatedTensor)
        whole[name] = value.value(source.value) if has_no_values else value
    for name, others in source.aliases.items():
        if name not in whole:
            continue
        for other in others:
            whole.setdefault(other, whole[name])
    return whole


def read_config(file: str | None, folder: Path) -> dict[str, Any] | None:
    """Return the model's configuration from ``file``, or from a folder of weights; None if there is none.

    Raises:
        SMPUserError: the file is no JSON object.
    """
    path = folder / CONFIG if file is None else Path(file)
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SMPUserError(
            f"{path} is no JSON ({error}); give the config.json that Transformers wrote", code="SMP402"
        ) from None
    if not isinstance(found, dict):
        raise SMPUserError(
            f"{path} holds {kind_of(found)}; give the config.json that Transformers wrote", code="SMP402"
        )
    return found
