"""Classes by which scripts recognize the blocks and mixtures of a transformed model, in wrap policies and checkpointing.

The original library replaced a model's blocks by classes of its own. Here blocks keep their classes, and these names stand for
all of them in ``isinstance``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

#: Blocks, and mixtures of experts, of transformed models.
_BLOCKS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_MIXTURES: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class MemberClass(type):
    """Makes ``isinstance`` true for the modules of a set."""

    members: Callable[[], Iterable[nn.Module]]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, nn.Module) and instance in cls.members()


class TransformerLayer(metaclass=MemberClass):
    """Stands for the blocks of transformed models in ``isinstance``."""

    @staticmethod
    def members() -> Iterable[nn.Module]:
        """Return all modules that count as instances."""
        return _BLOCKS


class TETransformerLayer(TransformerLayer):
    """Stands for the same blocks; scripts for older PyTorchs wrap it."""


class MoELayer(metaclass=MemberClass):
    """Stands for the mixtures of experts of transformed models in ``isinstance``."""

    @staticmethod
    def members() -> Iterable[nn.Module]:
        """Return all modules that count as instances."""
        return _MIXTURES


def noted_blocks() -> list[nn.Module]:
    """Return the blocks of transformed models that are alive."""
    return list(_BLOCKS)


def note_blocks(blocks: Iterable[nn.Module]) -> None:
    """Let modules count as blocks."""
    for block in blocks:
        _BLOCKS.add(block)


def note_mixtures(mixtures: Iterable[nn.Module]) -> None:
    """Let modules count as mixtures of experts."""
    for mixture in mixtures:
        _MIXTURES.add(mixture)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: the members of its outermost module lists."""
    found: list[nn.Module] = []
    seen: set[int] = set()
    for module in model.modules():
        is_inner = id(module) in seen
        if is_inner or not isinstance(module, nn.ModuleList):
            continue
        if len(module):
            seen.update(id(inside) for inside in module.modules())
            found += list(module)
    return found
