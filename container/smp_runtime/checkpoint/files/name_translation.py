"""Finding saved tensors under the names of the model that loads them.

Names are those of the wrapped model. A Hugging Face model that was replaced by a distributed one has others than the
original, and some of its tensors are transposed, cut or joined. The translations of states know how; here they run
once on tensors without values that remember what was done to them, and the same is done to the real ones, tensor by
tensor, when they are read: to weights, masters and optimizer states alike, since all of it only moves elements.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_runtime.checkpoint.files.manifest import Manifest, TensorRecord
from smp_runtime.errors import CheckpointError
from smp_runtime.tensors.torch_private import tree_leaves, tree_map

if TYPE_CHECKING:
    from smp_runtime.checkpoint.files.reader import CheckpointReader
    from smp_runtime.checkpoint.files.tensor_regions import TensorRegion


Translate = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class TranslatedTensor(torch.Tensor):
    """A tensor without values that knows the tensors of a checkpoint it is made of, and how."""

    made: tuple[Callable[..., Any], Any, Any, int | None] | None
    source: str | None
    sources: tuple[str, ...]

    @staticmethod
    def leaf(name: str, record: TensorRecord) -> TranslatedTensor:
        """Return a placeholder for a tensor of the checkpoint.

        Raises:
            CheckpointError: it is of a type that this PyTorch does not have.
        """
        dtype = getattr(torch, record.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                f"the checkpoint has {name} in the type {record.dtype!r}, which PyTorch {torch.__version__} does not have; update "
                "PyTorch, or use another checkpoint if it is damaged"
            )
        made = torch.empty(record.shape, dtype=dtype, device="meta").as_subclass(TranslatedTensor)
        made.made, made.source, made.sources = None, name, (name,)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.equal:
            # There are no values to compare: two tensors are equal if they are the same tensor of the checkpoint.
            return args[0].source is not None and args[0].source == args[1].source
        result = super().__torch_function__(func, types, args, kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, TranslatedTensor)]
        sources: dict[str, None] = {}
        for leaf in inputs:
            sources.update(dict.fromkeys(getattr(leaf, "sources", ())))
        is_several = isinstance(result, tuple | list)
        outputs = result if is_several else [result]
        for index, output in enumerate(outputs):
            # An operation may return its input, which keeps its own origin.
            is_input = any(output is leaf for leaf in inputs)
            if is_input or not isinstance(output, TranslatedTensor):
                continue
            place = index if is_several else None
            output.made = (func, args, kwargs, place)
            output.source, output.sources = None, tuple(sources)
        return result

    def value(self, leaf: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the tensor itself; ``leaf`` returns the tensors of the checkpoint."""
        if self.source is not None:
            return leaf(self.source)
        if self.made is None:
            raise AssertionError("a traced tensor came from nowhere")
        func, args, kwargs, index = self.made
        args, kwargs = tree_map(lambda x: x.value(leaf) if isinstance(x, TranslatedTensor) else x, (args, kwargs))
        result = func(*args, **kwargs)
        found: torch.Tensor = result if index is None else result[index]
        return found

    @property
    def is_leaf_of_checkpoint(self) -> bool:
        """Return whether it is a tensor of the checkpoint, unchanged."""
        return self.source is not None


class CheckpointNames:
    """The tensors of a checkpoint by the names of this model.

    Args:
        wanted: the model's parameters: all names of each, with its shape.
        to_ours: translations of the models that are distributed here, from Hugging Face's states.
    """

    def __init__(
        self,
        manifest: Manifest,
        wanted: Iterable[tuple[tuple[str, ...], tuple[int, ...]]],
        to_ours: Iterable[Translate],
    ) -> None:
        self._manifest = manifest
        wanted = list(wanted)
        leaves = {name: TranslatedTensor.leaf(name, record) for name, record in manifest.parameters.items()}
        plain = {alias: leaf for name, leaf in leaves.items() for alias in manifest.names_of(name)}
        plain |= {name: TranslatedTensor.leaf(name, record) for name, record in manifest.buffers.items()}
        self.is_translated = False
        self._found = plain
        if all(any(name in plain for name in names) for names, _ in wanted):
            return
        starts = [plain]
        if manifest.translations:
            # A model with a tied head and the model inside it may have the same names: try both.
            # The wanted tensors decide.
            starts = [*(_under_their_names(plain, manifest, has_heads) for has_heads in (True, False)), plain]
        ours = list(to_ours)
        headless = [getattr(getattr(f, "__self__", None), "headless_to_ours", f) for f in ours]
        for start in starts:
            for last in ((), ours, headless):
                state = start
                for translate in last:
                    state = dict(translate(state))
                if state is not plain and all(any(name in state for name in names) for names, _ in wanted):
                    self._found, self.is_translated = state, True
                    return

    def find(self, names: Iterable[str]) -> TranslatedTensor | None:
        """Return a tensor by any of its names here; None if the checkpoint does not have it."""
        return next((self._found[name] for name in names if name in self._found), None)

    def unused(self, used: Iterable[TranslatedTensor]) -> list[str]:
        """Return the checkpoint's parameters and buffers that are not used, by the checkpoint's names."""
        taken: set[str] = set()
        for traced in used:
            taken.update(traced.sources)
        known = list(self._manifest.parameters)
        if not self.is_translated:
            known += self._manifest.buffers
        return [name for name in known if name not in taken]


def read_into(
    target: torch.Tensor,
    wanted: TensorRegion,
    traced: TranslatedTensor,
    reader: CheckpointReader,
    key: Callable[[str], str],
) -> None:
    """Read a region of a tensor, translated if need be, into a live tensor.

    Args:
        target: ``[wanted.elements]`` in any shape.
        wanted: the region, of the shape that the tensor has here.
        key: the state key to read, by the checkpoint's name.
    """
    if traced.is_leaf_of_checkpoint:
        name = traced.sources[0]
        if target.is_contiguous():
            reader.fill(target, wanted, key(name), name)
            return
        dense = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        reader.fill(dense, wanted, key(name), name)
        target.copy_(dense)
        return
    whole = traced.value(lambda name: reader.whole(key(name), name))
    if tuple(whole.shape) != wanted.shape:
        raise CheckpointError(f"a translated tensor has shape {list(whole.shape)} instead of {list(wanted.shape)}")
    part = wanted.cut(whole)
    if wanted.is_slice:
        target.copy_(part.reshape(target.shape) if target.shape != part.shape else part)
    else:
        target.view(-1).copy_(part.reshape(-1)[wanted.first : wanted.last])


def _under_their_names(state: dict[str, Any], manifest: Manifest, has_heads: bool) -> dict[str, Any]:
    for translate in translations_to_theirs(manifest.translations, has_heads=has_heads):
        state = dict(translate(state))
    return state


# -- which models were distributed -------------------------------------------------------------------------------------


def translation_names(functions: Iterable[tuple[Any, Any]]) -> list[str]:
    """Return the translations' names in ``smp.nn.huggingface``, for the manifest; a script's own have none."""
    known: dict[int, str] = {}
    if functions:
        known = {id(names): title for title, names in _known().items()}
    titles = []
    for to_theirs, _ in functions:
        title = known.get(id(getattr(to_theirs, "__self__", None)))
        if title is not None:
            titles.append(title)
    return titles


def translations_to_theirs(titles: Iterable[str], *, has_heads: bool = True) -> list[Translate]:
    """Return the translations to Hugging Face's names, by their names in the manifest; skip unknown ones.

    Args:
        has_heads: False for a causal model without its head.
    """
    titles = list(titles)
    known = _known() if titles else {}
    found = [known[title] for title in titles if title in known]
    return [names.to_theirs if has_heads else getattr(names, "headless_to_theirs", names.to_theirs) for names in found]


def _known() -> dict[str, Any]:
    import smp_runtime.module_conversion.huggingface as package

    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        names = getattr(importlib.import_module(f"{package.__name__}.{module.name}"), "NAMES", None)
        if names is not None:
            found[module.name] = names
    return found


#: Causal masks and the like that older versions of Transformers saved and newer ones compute.
_COMPUTED = re.compile(
    r"(^|\.)(attn|attn\.attention|attention|self_attn)\.(masked_)?bias$|(^|\.)rotary_emb\.inv_freq$|"
    r"(^|\.)embeddings\.position_ids$"
)


def rename_prefixes(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return ``state`` with its prefixes changed to match the names of ``module``.

    States of other wrappers start with ``module.``. States of Transformers may lack the base model's name, or
    have it although the module is the base model. Masks that the module computes are left out. Other names stay,
    so that a strict load reports them.
    """
    own = set(module.state_dict(keep_vars=True))
    candidates = _candidates(dict(state), module, own)
    chosen = max(candidates, key=lambda candidate: len(own & candidate.keys()))
    return {name: value for name, value in chosen.items() if name in own or not _COMPUTED.search(name)}


def _candidates(state: dict[str, Any], module: nn.Module, own: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the state under several possible namings, the most literal first."""
    are_wrapped = all(name.startswith("module.") for name in state)
    own_are_wrapped = any(name.startswith("module.") for name in own)
    if are_wrapped and not own_are_wrapped:
        state = {name.removeprefix("module."): value for name, value in state.items()}
    yield state
    root = getattr(module, "base_model_prefix", None)
    if not root:
        return
    inside = getattr(module, root, None)
    if isinstance(inside, nn.Module):
        names = set(inside.state_dict(keep_vars=True))
        yield {f"{root}.{name}" if name in names else name: value for name, value in state.items()}
    yield {name.removeprefix(f"{root}."): value for name, value in state.items()}


def each_once(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``state`` with every tensor under the first of its names only, as safetensors files store it."""
    return {names[0]: state[names[0]] for names in names_of_each(state)}


def names_of_each(state: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """Return the names of every tensor in ``state``.

    Tensors that share memory and shape are one; those without values are one if they are the same object.
    """
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, value in state.items():
        place: tuple[Any, ...] = (id(value),)
        has_values = not value.is_meta and value.numel() > 0
        if has_values:
            place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        found.setdefault(place, []).append(name)
    return [tuple(names) for names in found.values()]


def record_of(tensor: torch.Tensor, aliases: tuple[str, ...] = ()) -> TensorRecord:
    """Return a whole tensor's record for the manifest."""
    return TensorRecord(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), aliases)
