"""Copies of a sequence's positions where PyTorch has views: what is written to one would not reach the other, and is an error.

Views of other dims are views of the slice, and share its memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    import torch

    from smp_runtime.context.exchange import ContextGroup


class _Sequence(Protocol):
    """A tensor that is cut over ranks."""

    local: torch.Tensor
    group: ContextGroup


@dataclass
class _Copy:
    """A copy of some positions, and what has become of it.

    Attributes:
        tensor: returns the elements of this rank, or the whole copy; None if it is gone.
        version: how often it had been written to when it was made.
        index: that it was made by, if it was.
        is_written: whether it was written to while it was a sequence.
        is_outdated: whether what it is a copy of was written to.
    """

    tensor: Callable[[], torch.Tensor | None]
    version: int
    index: Any
    is_written: bool = False
    is_outdated: bool = False

    def has_changed(self) -> bool:
        """Return whether the copy was written to."""
        found = self.tensor()
        return self.is_written or (found is not None and found._version != self.version)


#: The copies of some positions of a slice, by the tensor that owns the slice's memory.
_copies: dict[int, list[_Copy]] = {}

#: Copies that are sequences, by their own slice.
_sources: dict[int, _Copy] = {}

#: A whole copy is kept while its sequence is there if it has so small a part of the slice: it is known then whether it was changed.
_SMALL = 4


def owner_of_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a view is of; any other tensor itself."""
    return tensor if tensor._base is None else tensor._base


def note_copy(sequence: _Sequence, copy: torch.Tensor, index: Any = None) -> None:
    """Remember a copy of some positions of a sequence, as a sequence or whole.

    Args:
        index: that it was made by.
    """
    owner = owner_of_memory(sequence.local)
    if owner.is_inference():
        return
    held = _copies.get(id(owner))
    if held is None:
        held = _copies[id(owner)] = []
        weakref.finalize(owner, _copies.pop, id(owner), None).atexit = False
    held[:] = [one for one in held if one.is_written or one.tensor() is not None]
    is_sequence = hasattr(copy, "sequence_layout")
    made: torch.Tensor = getattr(copy, "local", copy)
    is_small = not is_sequence and made.numel() * _SMALL <= sequence.local.numel()
    alias = made.detach() if is_small else None
    noted = _Copy(weakref.ref(made) if alias is None else lambda: alias, made._version, index)
    held.append(noted)
    if is_sequence:
        _sources[id(made)] = noted
        weakref.finalize(made, _sources.pop, id(made), None).atexit = False


def are_there() -> bool:
    """Return whether there are copies."""
    return bool(_copies)


class Use:
    """An operation on sequences that have copies, or are copies.

    Args:
        name: of the operation.
        sequences: among its arguments.
        args: its arguments.

    Raises:
        SMPUserError: PyTorch would let the operation see what was written to a copy, or to the sequence of a copy.
    """

    def __init__(self, name: str, sequences: Sequence[_Sequence], args: tuple[Any, ...]) -> None:
        self._name = name
        self._given = [(one, one.local._version) for one in sequences if not one.local.is_inference()]
        for sequence in sequences:
            owner = id(owner_of_memory(sequence.local))
            held = _copies.get(owner, [])
            if name == "__setitem__" and args[0] is sequence:  # ``x[:, 1:] += y`` sets what it has changed
                held[:] = [one for one in held if not _is_of(one, args[1], args[2])]
            if any(one.has_changed() for one in held):
                raise _error(name, sequence, "some of its positions were changed in place")
            if owner in _sources and _sources[owner].is_outdated:
                raise _error(name, sequence, "the sequence that these positions are of was changed in place")

    def end(self) -> None:
        """Note what the operation has written to.

        Raises:
            SMPUserError: whole copies of a sequence that was changed could still be used.
        """
        for sequence, version in self._given:
            if sequence.local._version == version:
                continue
            owner = id(owner_of_memory(sequence.local))
            if owner in _sources:
                _sources[owner].is_written = True
            if self._name != "__setitem__":
                for copy in _copies.get(owner, ()):
                    copy.is_outdated = True


def _is_of(copy: _Copy, index: Any, value: Any) -> bool:
    """Return whether a value that is set to positions is their changed copy."""
    made = value.local if hasattr(value, "sequence_layout") else value
    found = copy.tensor()
    if found is None or copy.index is None or not hasattr(made, "data_ptr"):
        return False
    return _describe(copy.index) == _describe(index) and found.data_ptr() == made.data_ptr()


def _describe(index: Any) -> str:
    return str(index if isinstance(index, tuple) else (index,))


def _error(name: str, sequence: _Sequence, what: str) -> SMPUserError:
    return SMPUserError(
        f"{name} got a sequence that is cut over {sequence.group.size} ranks, and {what}: where PyTorch has views of positions, "
        "context parallelism has copies, so the change does not reach both; use operations that return new tensors, as x * 2 in "
        "place of x.mul_(2), or assign to positions, as x[:, 1:] = y",
        code="SMP303",
    )
