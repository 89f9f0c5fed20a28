"""``"compile": true``: blocks of a model that run wholly on this rank are compiled by ``torch.compile``, each kind once.

What is compiled is the ``forward`` of repeated blocks: the elements of ``nn.ModuleList`` and ``nn.Sequential`` of one class,
the outermost that have no part on another rank. Their own hooks, checkpointing and the pipeline stay outside, so that none of
them breaks a graph. Blocks of one class share one compiled function, which takes their parameters as inputs; it is compiled
when the first of them is called, and again for another shape.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from smp_runtime.tensors.later import LaterTensor
from smp_runtime.tensors.torch_private import (
    DisableTorchFunction,
    compile_errors,
    count_function_modes,
    tree_leaves,
    tree_map,
)

logger = logging.getLogger("smp")


class CompiledForward:
    """Stands in for the ``forward`` of a block; a copy of the block, or one read from a file, has its own forward again."""

    def __init__(self, block: nn.Module, path: str, compiled: Callable[..., Any]) -> None:
        self._block = block
        self._path = path
        self._compiled: Callable[..., Any] | None = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's result; eager, from the first call that cannot be compiled."""
        if self._compiled is None:
            return self._eager(*args, **kwargs)
        if any(isinstance(leaf, LaterTensor) for leaf in tree_leaves((args, kwargs))):
            args, kwargs = tree_map(_plain, (args, kwargs))
        # A function mode would be compiled too; with none, entering this would be one more thing that compiled code depends on.
        modes_off = DisableTorchFunction() if count_function_modes() else contextlib.nullcontext()
        try:
            with modes_off:
                return self._compiled(self._block, *args, **kwargs)
        except compile_errors() as error:
            self._compiled = None
            said = " ".join(str(error).split("\n\n")[0].split())
            logger.warning("block %r is not compiled and runs eagerly: %s: %s", self._path, type(error).__name__, said)
            return self._eager(*args, **kwargs)

    def _eager(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._block).forward(self._block, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return functools.partial(type(self._block).forward, memo[id(self._block)])

    def __reduce__(self) -> Any:
        return functools.partial, (type(self._block).forward, self._block)


def _plain(leaf: Any) -> Any:
    return leaf.plain() if isinstance(leaf, LaterTensor) else leaf


def compile_blocks(
    module: nn.Module,
    has: Callable[[str], bool],
    backend: str,
    make_one: Callable[[nn.Module], str | None] | None = None,
) -> list[str]:
    """Have the blocks of a model that are on this rank compiled when they are called; returns their paths.

    Args:
        has: whether the module at a path is here.
        backend: of ``torch.compile``.
        make_one: sees to it that nothing interrupts a block's forward; or says why something must.
    """
    compiled: dict[type, Callable[..., Any]] = {}
    found = list(_blocks(module, "", has))
    reasons = {path: reason for path, block in found if make_one is not None and (reason := make_one(block))}
    for reason in dict.fromkeys(reasons.values()):
        paths = [path for path, said in reasons.items() if said == reason]
        logger.warning(
            "%d of %d blocks (%s …) are not compiled and run eagerly: %s", len(paths), len(found), paths[0], reason
        )
    for path, block in found:
        if path in reasons:
            continue
        kind = type(block)
        if kind not in compiled:
            compiled[kind] = torch.compile(kind.forward, dynamic=False, backend=backend)
        block.__dict__["forward"] = CompiledForward(block, path, compiled[kind])
    if not found:
        logger.warning(
            "compile has no effect on this rank: it has no repeated blocks, which are elements of nn.ModuleList or nn.Sequential "
            "of one class; compile modules yourself with module.compile()"
        )
    return [path for path, _ in found if path not in reasons]


def _blocks(module: nn.Module, path: str, has: Callable[[str], bool]) -> Iterator[tuple[str, nn.Module]]:
    """The outermost repeated blocks that are wholly here, with their paths."""
    kinds = Counter(type(child) for child in module.children())
    listed = isinstance(module, (nn.ModuleList, nn.Sequential))
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        repeated = listed and kinds[type(child)] > 1 and next(child.parameters(), None) is not None
        if repeated and _is_whole(child, below, has):
            yield below, child
        else:
            yield from _blocks(child, below, has)


def _is_whole(block: nn.Module, path: str, has: Callable[[str], bool]) -> bool:
    return all(has(f"{path}.{name}" if name else path) for name, _ in block.named_modules())
