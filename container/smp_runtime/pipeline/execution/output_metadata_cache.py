"""Predicted results of module calls, learned from earlier calls: shapes, types and which tensors are really used.

If the result of a call is known in advance, the call returns at once, with handles. A result is known if
calls with the same arguments (structure, shapes, types, modes) have returned the same structure at least
twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from smp_runtime.pipeline.execution.value_store import child_of
from smp_runtime.pipeline.transport.messages import Reply, TensorSlot
from smp_runtime.pipeline.transport.packing import unpack

if TYPE_CHECKING:
    from smp_runtime.tensors.remote_tensor import Name, Path, TensorMetadata

#: Equal results before calls return without waiting.
SIGHTINGS = 2
#: Kinds of calls that are remembered; scripts with ever new shapes would fill the memory.
MOST_KINDS = 4096
#: Characters of a result that a message shows.
_SHOWN = 160


class Template(NamedTuple):
    """The origin of a tensor in a result, independent of microbatch and caller."""

    argument: int | None  # number of the argument that it is; None if the call made it
    kind: str  # of its name
    suffix: Path  # call numbers below the call, for a value that a call inside made
    number: int  # index in its name
    owner: int  # stage
    meta: TensorMetadata  # shape and type

    def slot(self, microbatch: int, path: Path, arguments: Sequence[tuple[Name, int]]) -> TensorSlot:
        """Return the slot of this tensor in the result of one call."""
        if self.argument is not None:
            name, owner = arguments[self.argument]
            return TensorSlot(name, owner, self.meta, False)
        return TensorSlot((self.kind, microbatch, path + self.suffix, self.number), self.owner, self.meta, False)


def template_of(slot: TensorSlot, path: Path, arguments: Sequence[Name]) -> Template | None:
    """Return the template of a tensor, or None if its origin cannot be named in advance."""
    if slot.name in arguments:
        return Template(arguments.index(slot.name), "", (), 0, 0, slot.meta)
    suffix = child_of(slot.name[2], path)
    return None if suffix is None else Template(None, slot.name[0], suffix, slot.name[3], slot.owner, slot.meta)


class OutputMetadata(NamedTuple):
    """A result: structure and tensors; None stands for a gradient that does not exist."""

    head: bytes
    templates: tuple[Template | None, ...]
    is_nameable: bool

    @property
    def digest(self) -> bytes:
        """Return a digest that is equal for equal results, on every rank."""
        return hashlib.blake2b(self.head + repr(self.templates).encode(), digest_size=16).digest()

    def of_own_tensors(self, single: bytes) -> tuple[TensorMetadata | None, ...] | None:
        """Return the tensors' metadata if the call makes each one, and gives nothing else back; else None.

        Args:
            single: head of a result that is one tensor. Gradients have none.
        """
        kind = {single: "F", b"": "B"}.get(self.head)
        for number, template in enumerate(self.templates):
            if template is not None and template[:4] != (None, kind, (), number):
                return None
        return None if kind is None else tuple([template and template.meta for template in self.templates])


def outcome_of(
    head: bytes, slots: Sequence[TensorSlot | None], path: Path, arguments: Sequence[Name]
) -> OutputMetadata:
    """Return the metadata of a call's result in a form that also holds for the next call."""
    templates = []
    is_nameable = True
    for slot in slots:
        template = None if slot is None else template_of(slot, path, arguments)
        templates.append(template)
        if slot is not None and template is None:
            is_nameable = False
    return OutputMetadata(head, tuple(templates), is_nameable)


def describe_difference_of(before: OutputMetadata, slots: Sequence[TensorSlot | None], head: bytes) -> str:
    """Return text for a message: the actual result, and the expected one where they differ."""
    then = [None if template is None else template.meta for template in before.templates]
    now = [None if slot is None else slot.meta for slot in slots]
    if then != now:
        return f"{describe_tensors(now)} and not {describe_tensors(then)}"
    if before.head == head:
        return f"{describe_tensors(now)}, but from other places (an argument as it was, or a result of its own)"
    old, new = _shown(before.head, now), _shown(head, now)
    start = 0
    for place, (one, other) in enumerate(zip(old, new, strict=False)):
        if one != other:
            start = place
            break
    # Some of the equal text before the difference shows where it is.
    start = 0 if start < _SHOWN // 2 else start - _SHOWN // 4
    end = start + _SHOWN
    return f"{new[start:end]} and not {old[start:end]}"


def describe_tensors(metas: Sequence[TensorMetadata | None]) -> str:
    """Return types, shapes and ``requires_grad`` of tensors as text."""
    return ", ".join(map(_text, metas)) or "no tensors"


def _text(meta: TensorMetadata | None) -> str:
    if meta is None:
        return "none"
    kind = f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}"
    return f"{kind} with requires_grad" if meta.requires_grad else kind


def _shown(head: bytes, metas: Sequence[TensorMetadata | None]) -> str:
    """Return a result as text, including the values that are not tensors."""
    try:
        texts = [_Text(_text(meta)) for meta in metas]
        result, changed = unpack(head, texts, module_of=cast("Any", _Text))
        if changed is None:
            return repr(result)
        return f"{result!r} with the arguments {changed!r}"
    except Exception as error:  # an error in someone's __repr__ must not hide the message
        return f"(something that cannot be shown: {type(error).__name__})"


class _Text(str):
    """A stand-in for a tensor or module in a text."""

    __repr__ = str.__str__


class LearnedOutput:
    """The knowledge about one kind of result.

    Attributes:
        outcome: of the last call.
        digest: of that outcome, once it is relied on.
        goes: pairs of a tensor of it and a stage that needed its elements, the caller's own stage included.
    """

    def __init__(self) -> None:
        self.outcome: OutputMetadata | None = None
        self._sightings = 0
        self._varies = False
        self.digest: bytes | None = None
        self.goes: set[tuple[int, int]] = set()
        self._sorted: tuple[tuple[int, int], ...] = ()

    @property
    def ways(self) -> tuple[tuple[int, int], ...]:
        """Return :attr:`goes` in one order."""
        if len(self._sorted) != len(self.goes):  # nothing is ever removed
            self._sorted = tuple(sorted(self.goes))
        return self._sorted

    @property
    def is_known(self) -> bool:
        """Return whether the next call's result can be predicted."""
        return self._sightings >= SIGHTINGS

    def is_needed(self, index: int, stage: int) -> None:
        """Record that a stage needs the elements of a tensor of the result; next time they are sent without a request."""
        self.goes.add((index, stage))

    def observe(self, outcome: OutputMetadata) -> bool:
        """Record a result, and return whether something was learned that may change the next call."""
        if self._varies:
            return False
        if (self.outcome is not None and outcome != self.outcome) or not outcome.is_nameable:
            self._varies = True
            self._sightings = 0
            return True
        self.outcome = outcome
        self._sightings += 1
        self.digest = outcome.digest
        return self._sightings <= SIGHTINGS


class OutputPrediction:
    """The knowledge about one kind of call.

    Attributes:
        forward: its result, by which arguments came as elements and not by name: a module that has the elements
            can hand them on as a value of its own.
        backward: the gradients of its backward pass, by the key of ``forward``, and by which outputs had a
            gradient and how it came.
        touched: which arguments the module used itself; None before the first call.
    """

    def __init__(self) -> None:
        self.forward: dict[tuple[bool, ...], LearnedOutput] = {}
        self.backward: dict[Hashable, LearnedOutput] = {}
        self.touched: tuple[bool, ...] | None = None

    def learn_touched(self, reply: Reply) -> None:
        """Mark the arguments that the module has used; marked arguments stay marked.

        Sending an argument in vain is cheaper than waiting for it.
        """
        before = self.touched or (False,) * len(reply.touched)
        pairs = zip(before, reply.touched, strict=True)
        self.touched = tuple(former or now for former, now in pairs)


class OutputMetadataCache:
    """All kinds of calls that this rank makes."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, OutputPrediction] = {}

    def of(self, kind: Hashable) -> OutputPrediction:
        """Return the prediction for a kind of call; an empty one is created for a new kind."""
        found = self._kinds.get(kind)
        if found is None:
            if len(self._kinds) >= MOST_KINDS:
                self._kinds.clear()
            found = self._kinds[kind] = OutputPrediction()
        return found
