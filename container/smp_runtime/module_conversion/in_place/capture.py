"""The calls of a model's blocks: the model runs once, on a few tokens, with weights that take no memory."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smp_runtime.module_conversion.in_place.block_calls import BlockCall
from smp_runtime.module_conversion.in_place.equivalence_check import leave_out_hooks
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.tensors.nested import argument_tensors
from smp_runtime.tensors.torch_private import without_modes

#: Batch size and length of trial calls. A dimension of either size, or of a multiple of the first, is recognized by it.
BATCH, LENGTH = 3, 7
#: Calls of a block are taken apart by positional arguments and keywords; of each, this much is tried.
_SIZES_TRIED = 4


class _AllSeenError(Exception):
    """Every block was called."""


def calls_of(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, BlockCall]:
    """Return the arguments that ``blocks``, by their paths in ``model``, are called with.

    Blocks without a known call are left out. Activations are random numbers of the right shapes. Those arguments
    require a gradient that do so in training.
    """
    found: dict[str, BlockCall] = {}
    # Seeded, so that a job decides the same in every run, and forked, so that the script's random numbers stay its own.
    with without_modes(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        copied = _without_memory(model)
        if copied is not None:
            parts = dict(copied.named_modules(remove_duplicate=False))
            _watch({path: parts[path] for path in blocks}, found)
            for arguments in _guesses(model):
                try:
                    with _WithoutMemory():
                        copied(**arguments) if isinstance(arguments, dict) else copied(*arguments)
                except Exception:  # a model may refuse a guess in any way; the next one is tried
                    continue
                if len(found) == len(blocks):
                    break
        for path, block in blocks.items():
            call = None if path in found else _guessed_call(block)
            if call is not None:
                found[path] = call
    return found


class _WithoutMemory(TorchFunctionMode):
    """Answers operations that refuse weights of :func:`_without_memory` with a result of the right shape."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "_grouped_mm" and 0 in args[1].stride():
            tokens, weights = args[:2]  # [tokens, in] and [experts, in, out]; it refuses weights with strides of 0
            return (tokens[:, :1] * 0.0).repeat(1, weights.shape[-1])
        return func(*args, **(kwargs or {}))


class _OtherUses(TorchFunctionMode):
    """Notes which weights are used by another than the module that is running.

    Args:
        owners: by a weight's ``id``, the paths of the modules that it belongs to.
    """

    def __init__(self, owners: Mapping[int, tuple[str, ...]]) -> None:
        self._owners = owners
        self.running: list[str] = []
        self.found: set[str] = set()
        self.shapes: dict[str, list[torch.Size]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads_attribute = getattr(func, "__name__", "") == "__get__"  # types and devices may be read
        if reads_attribute:
            return func(*args, **kwargs)
        for argument in (*args, *kwargs.values()):
            values = argument if isinstance(argument, list | tuple) else (argument,)
            self._note(values)
        return func(*args, **kwargs)

    def watch(self, part: nn.Module, path: str, hooks: contextlib.ExitStack) -> None:
        """Note when a module runs, and the shapes of its inputs, until ``hooks`` are removed."""

        def before(_: nn.Module, args: Any) -> None:
            self.running.append(path)
            if args and isinstance(args[0], torch.Tensor):
                self.shapes.setdefault(path, []).append(args[0].shape)

        def behind(*_: Any) -> None:
            self.running.pop()

        hooks.enter_context(part.register_forward_pre_hook(before))
        hooks.enter_context(part.register_forward_hook(behind, always_call=True))

    def shapes_in(self, model: nn.Module, guesses: Iterable[Any]) -> dict[str, list[torch.Size]]:
        """Return the shapes in a run of a model with the first arguments that it takes; without any, none."""
        for arguments in guesses:
            self.shapes.clear()
            try:
                with self, _WithoutMemory():
                    model(**arguments) if isinstance(arguments, dict) else model(*arguments)
            except Exception:  # the model does not take arguments of this form
                self.running.clear()
                continue
            return self.shapes
        return {}

    def _note(self, values: Iterable[Any]) -> None:
        """Record the owners of weights among some values, unless one of them runs."""
        # A module that runs may read its own weight; only the innermost one counts, as others merely contain it.
        running = self.running[-1] if self.running else None
        for value in values:
            owners = self._owners.get(id(value), ())
            if running not in owners:
                self.found.update(owners)


def calls_by_themselves(model: nn.Module, paths: Sequence[str]) -> dict[str, list[torch.Size]]:
    """Return the input shapes of embeddings and heads.

    Modules are left out if other code uses their weight, or if they are not called.
    """
    shapes, used = _shapes_and_uses(model, paths)
    return {path: found for path, found in shapes.items() if path not in used}


def used_by_others(model: nn.Module, paths: Sequence[str]) -> set[str]:
    """Return the modules at ``paths`` with a weight that other code uses too, up to where the model runs."""
    return _shapes_and_uses(model, paths)[1]


def _shapes_and_uses(model: nn.Module, paths: Sequence[str]) -> tuple[dict[str, list[torch.Size]], set[str]]:
    """Return the modules' input shapes, and the modules with weights that other code uses.

    The shapes are empty if the model cannot be run.
    """
    with without_modes(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        copied = _without_memory(model)
        if copied is None:
            return {}, set()
        owners: dict[int, tuple[str, ...]] = {}
        for path in paths:
            for weight in (copied.get_submodule(path).weight, model.get_submodule(path).weight):
                owners[id(weight)] = (*owners.get(id(weight), ()), path)
        uses = _OtherUses(owners)
        with contextlib.ExitStack() as hooks:
            # A forward that a script has set on the model is a closure: on the copy too, it runs the original's modules.
            for root, path in itertools.product((copied, model), paths):
                uses.watch(root.get_submodule(path), path, hooks)
            return uses.shapes_in(copied, _guesses(model)), uses.found


def _watch(parts: Mapping[str, nn.Module], found: dict[str, BlockCall]) -> None:
    """Note the first call of each part that does not fail."""
    begun: dict[str, BlockCall] = {}

    def before(path: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            # If weights are frozen, nothing requires gradients here. But later blocks may have to pass gradients back.
            is_frozen = not any(tensor.requires_grad for tensor in argument_tensors((args, kwargs)))
            begun[path] = BlockCall(*_drawn((args, kwargs), is_frozen=is_frozen))

        return hook

    def behind(path: str) -> Any:
        def hook(_: nn.Module, args: Any, result: Any) -> None:
            found.setdefault(path, begun[path])
            if len(found) == len(parts):
                raise _AllSeenError

        return hook

    for path, part in parts.items():
        part.register_forward_pre_hook(before(path), with_kwargs=True)
        part.register_forward_hook(behind(path))


def _drawn(value: Any, *, is_frozen: bool) -> Any:
    """Return a structure of arguments with random activations; other values stay."""
    if isinstance(value, torch.Tensor):
        return _drawn_tensor(value, is_frozen=is_frozen)
    draw = functools.partial(_drawn, is_frozen=is_frozen)
    if isinstance(value, dict):
        return {key: draw(item) for key, item in value.items()}
    is_named_tuple = hasattr(value, "_fields")
    if isinstance(value, tuple) and not is_named_tuple:
        return tuple(map(draw, value))
    if isinstance(value, list):
        return list(map(draw, value))
    return value


def _drawn_tensor(value: torch.Tensor, *, is_frozen: bool) -> torch.Tensor:
    # Activations of a model without memory are equal for all tokens, so they are drawn. Masks and positions stay.
    has_tokens = value.dim() == 3 and value.shape[:2] == (BATCH, LENGTH)
    is_activation = has_tokens and value.is_floating_point()
    if is_activation:
        # float64, so that rounding cannot hide a difference between the whole block and its parts.
        requires_grad = value.requires_grad or is_frozen
        return torch.randn(value.shape, dtype=torch.float64, requires_grad=requires_grad)
    return value.detach().clone().requires_grad_(value.requires_grad)


def _without_memory(model: nn.Module) -> nn.Module | None:
    """Return a copy with one random row per parameter, expanded to its shape.

    Return None if the model cannot be copied, or cannot run on one rank alone.
    """
    if any(isinstance(part, DistributedModule) for part in model.modules()):
        return None
    # `copy.deepcopy` takes what `memo` has under an object's id for the copy that it has made already.
    memo: dict[int, Any] = {}
    for part in model.modules():
        _replace_values(part, memo)
        leave_out_hooks(part, memo)
    return _copied(model, memo)


def _replace_values(part: nn.Module, memo: dict[int, Any]) -> None:
    for parameter in part.parameters(recurse=False):
        # A tied weight keeps one copy: its second use must not draw another row.
        if id(parameter) not in memo:
            memo[id(parameter)] = nn.Parameter(_row(parameter), requires_grad=parameter.requires_grad)
    # A buffer with values, such as a mask, is copied as it is.
    for buffer in part.buffers(recurse=False):
        if buffer.is_meta:
            memo[id(buffer)] = torch.ones(buffer.shape, dtype=buffer.dtype, device="cpu")


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module | None:
    """Return a copy of a model in evaluation mode, with the replacements in ``memo`` by ``id``; None if it fails."""
    try:
        copied = copy.deepcopy(model, memo).eval()
    except Exception:  # a class may copy itself by any code; without a copy nothing is proven, and nothing split
        return None
    for config in (vars(part).get("config") for part in copied.modules()):
        # Training uses no cache, and a cache holds results that the block computes.
        if config is not None and getattr(config, "use_cache", None) is True:
            config.use_cache = False
    return copied


def _row(parameter: torch.Tensor) -> torch.Tensor:
    last = parameter.shape[-1:] if parameter.dim() else ()
    row = torch.ones(last, dtype=parameter.dtype, device="cpu")
    if row.is_floating_point():
        row = (torch.randn(last, device="cpu") / max(1, row.numel()) ** 0.5).to(parameter.dtype)
    return row.expand(parameter.shape)


def _guesses(model: nn.Module) -> Iterator[Any]:
    """Yield arguments that the model may take."""
    tokens = min((part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)), default=8)
    ids = torch.randint(max(1, min(tokens, 1000)), (BATCH, LENGTH), device="cpu")
    names = _names(model)
    if "input_ids" in names:
        more = {"use_cache": False} if "use_cache" in names else {}
        if "decoder_input_ids" in names:
            yield {"input_ids": ids, "decoder_input_ids": ids, **more}
        yield {"input_ids": ids, **more}
    if "pixel_values" in names:
        config = getattr(model, "config", None)
        config = getattr(config, "vision_config", config)
        size, channels = getattr(config, "image_size", 32), getattr(config, "num_channels", 3)
        yield {"pixel_values": torch.randn(BATCH, channels, size, size, device="cpu")}
    yield (ids,)
    for size in _sizes(model):
        yield (torch.randn(BATCH, LENGTH, size, device="cpu"),)
        yield (torch.randn(BATCH, size, device="cpu"),)
    yield (ids, ids)


def _guessed_call(block: nn.Module) -> BlockCall | None:
    """Return a call of a single block with only activations, if it accepts that."""
    copied = _without_memory(block)
    if copied is None:
        return None
    for size in _sizes(block):
        for shape in ((BATCH, LENGTH, size), (BATCH, size)):
            x = torch.randn(shape, dtype=torch.float64, device="cpu", requires_grad=True)
            try:
                copied.double()(x)
            except Exception:  # the block does not take an input of this shape
                continue
            return BlockCall((x,), {})
    return None


def _sizes(module: nn.Module) -> Sequence[int]:
    """Return the numbers of channels that the first layers take."""
    found: dict[int, None] = {}
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            found[part.normalized_shape[-1]] = None
        elif isinstance(part, nn.Linear):
            found[part.in_features] = None
    return list(found)[:_SIZES_TRIED]


def _names(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)
