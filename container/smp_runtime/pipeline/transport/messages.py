"""Message types between pipeline ranks: requests, replies, values and the progress of a step."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from smp_runtime.tensors.remote_tensor import Name, Path, TensorMetadata

if TYPE_CHECKING:
    import torch

    from smp_records.records import FailureRecord


class TensorSlot(NamedTuple):
    """A tensor in a request or reply."""

    name: Name  # under which its owner keeps it
    owner: int  # stage that has it, or will
    meta: TensorMetadata  # its shape and type
    comes: bool  # whether it is in the message or on its way; else the receiver asks for it when it touches it


class Modes(NamedTuple):
    """Thread-local modes of PyTorch that a called module must see."""

    grad: bool  # whether graphs are recorded
    #: Kinds of devices that cast, whether they keep cast weights, and to what.
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    #: Kind of the default device for new tensors, each rank's own of that kind; None if none is set.
    device: str | None = None


class GroupCall(NamedTuple):
    """The target of a call of several modules of one stage: they run one after the other, as one checkpointed region."""

    members: tuple[str, ...]  # paths of the modules
    preserve_rng_state: bool  # whether the region draws the same random numbers when it is run again

    def __str__(self) -> str:
        return f"checkpointed {'' if self.preserve_rng_state else 'without random state '}{' + '.join(self.members)}"


class ForwardCall(NamedTuple):
    """A request to run a module forward. Tensors of the message: those named in ``inline``."""

    microbatch: int
    path: Path
    module: str | GroupCall
    head: bytes
    mutable: bool  # whether the arguments hold something that the module could change
    slots: tuple[TensorSlot, ...]
    modes: Modes
    training: bytes  # flags of the module and of all in it
    nth: int  # how often the caller's task has called this module before
    wants_reply: bool
    expected: bytes | None  # digest of the outputs that the caller has predicted
    goes: tuple[tuple[int, int], ...]  # outputs, and stages to send them to unasked
    inline: tuple[Name, ...]


class BackwardCall(NamedTuple):
    """A request to run a call's backward pass, from the gradients of its outputs. Tensors: those named in ``inline``."""

    microbatch: int
    path: Path
    slots: tuple[TensorSlot | None, ...]
    in_model_backward: bool
    accumulates: bool  # whether parameters get gradients, which torch.autograd.grad leaves alone
    wants_reply: bool
    expected: bytes | None
    goes: tuple[tuple[int, int], ...]  # gradients, and stages to send them to unasked
    inline: tuple[Name, ...]


class Reply(NamedTuple):
    """The result of a call or of its backward pass; sent only if the caller could not predict it."""

    kind: str
    microbatch: int
    path: Path
    head: bytes
    slots: tuple[TensorSlot | None, ...]
    touched: tuple[bool, ...]


class Done(NamedTuple):
    """The news that a request and all requests that it has made itself are done."""

    kind: str
    microbatch: int
    path: Path


class AllDone(NamedTuple):
    """The news that all calls of a microbatch are done that the step's program has for this stage."""

    microbatch: int


class ProgramLeft(NamedTuple):
    """The root stage's news that the rest of the step does not follow its program, but goes on with requests."""

    why: str


class Deliver(NamedTuple):
    """A request to send a value to another stage as soon as it exists."""

    name: Name
    stage: int


class ValueMessage(NamedTuple):
    """Values; their tensors travel with the message. In a step with a program it may be a request too."""

    names: tuple[Name, ...]
    group: int | None = None  # of the step's program: the receiver runs its calls of this group
    finished: tuple[int, ...] = ()  # microbatches that are finished, as ``Release``


class Release(NamedTuple):
    """The news that a microbatch is finished, so that its values can be forgotten."""

    microbatch: int


class StepKind(NamedTuple):
    """The common properties of steps that normally take the same course."""

    course: Hashable  # step function and modes
    shapes: Hashable  # of its arguments


class StepAnnouncement(Protocol):
    """A script's call of a step; pickled, since the other stages compare the root stage's call with their own."""

    def check(self, root: Any, rank: int, root_rank: int) -> str:
        """Compare this rank's call with the root stage's, and return a warning, or an empty text.

        Raises:
            SMPUserError: the ranks run different steps.
        """


class Begin(NamedTuple):
    """The root stage's message that it has begun the step."""

    seed: int  # from which every task's random numbers follow
    kind: StepKind | None  # of step: recorded order belongs to one kind; None: it has no order
    replays: bool  # whether the planned order of this kind is replayed
    order: Any  # this stage's planned order, if it was planned since the last step of this kind
    is_recorded: bool  # whether the stages record their work
    is_serial: bool  # whether the microbatches run one after the other
    requires: bytes  # which parameters require gradients
    call: StepAnnouncement  # how the root stage's script has called the step
    program: Any = None  # number of the step's program, and this stage's part of it if that is new; None: it has none


class Diverged(NamedTuple):
    """The news that the step does not follow the planned order; it goes on in the order in which work arrives."""

    why: str


class Ask(NamedTuple):
    """The root stage's question about a stage's progress, if pipelines with one common order may have to leave it."""

    number: int  # of the question
    halts: bool  # whether the stage stops at its place in the planned order


class StageProgress(NamedTuple):
    """The progress of a stage."""

    number: int  # of the question
    position: int  # its place in the planned order
    is_running: bool  # whether a task computes
    sent: tuple[int, ...]  # messages of the step, by stage
    handled: tuple[int, ...]  # likewise
    ready: Any  # the urgency and the name of the task that would run next without an order; None if no task can run


class Turn(NamedTuple):
    """The root stage's command to a halted stage to run something."""

    limit: int  # the place up to which it follows the planned order
    task: Any  # the one task that runs its next segment after that, in any order; None for no task


class End(NamedTuple):
    """The message that all microbatches are done. Tensors of the message: those in the outputs."""

    outputs: bytes  # the step function's results, packed
    wants_record: bool  # whether the root stage plans from this step
    training: bytes | None  # the flags of all modules after the step function, None if it has changed none


class Record(NamedTuple):
    """The record of a stage's work in the step."""

    segments: Any  # of its tasks
    learned: int  # results that were not known in advance
    changed_buffers: bool  # whether its modules changed buffers, or attributes that the next microbatch reads
    is_serial: bool  # whether no microbatch may begin before the one before it is finished, because of such attributes


class Fail(NamedTuple):
    """An error that ends the step on all stages."""

    stage: int
    rank: int
    place: str  # what raised: a module or the step function
    failure: FailureRecord


#: A message as it travels: the step's number; the message, None if there is only news; the news about ends.
#: All are plain tuples, because pickling named ones costs more than everything else in a message.
Stamped = tuple[int, "tuple[Any, ...] | None", tuple[tuple[Any, ...], ...]]

_KINDS: tuple[Any, ...] = (
    *(ValueMessage, ForwardCall, BackwardCall, Done, Release, Reply, Deliver),
    *(Begin, Diverged, End, Record, Fail),
    *(Ask, StageProgress, Turn),
    *(AllDone, ProgramLeft),
)
#: Messages about the others, which are not counted themselves and bring no news.
UNCOUNTED = (Ask, StageProgress, Turn)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
#: Position of the slots in the messages that have any.
_SLOTS: dict[Any, int] = {kind: kind._fields.index("slots") for kind in (ForwardCall, BackwardCall, Reply)}
_MODES = ForwardCall._fields.index("modes")


def to_plain(message: Any) -> tuple[Any, ...]:
    """Return a message as plain tuples: the number of its kind, then its fields."""
    kind = type(message)
    fields = list(message)
    if (place := _SLOTS.get(kind)) is not None:
        fields[place] = tuple(
            [None if slot is None else (*slot[:2], tuple(slot[2]), slot[3]) for slot in fields[place]]
        )
        if kind is ForwardCall:
            fields[_MODES] = tuple(fields[_MODES])
    return _CODES[kind], *fields


def from_plain(fields: tuple[Any, ...]) -> Any:
    """Return the message from its plain form, the reverse of :func:`to_plain`."""
    kind = _KINDS[fields[0]]
    if (place := _SLOTS.get(kind)) is None:
        return kind(*fields[1:])
    values = list(fields[1:])
    values[place] = tuple(
        [None if s is None else TensorSlot(s[0], s[1], TensorMetadata(*s[2]), s[3]) for s in values[place]]
    )
    if kind is ForwardCall:
        values[_MODES] = Modes(*values[_MODES])
    return kind(*values)
