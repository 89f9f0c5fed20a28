"""A step program: the calls of the step function by microbatch, in groups that one message begins.

The messages of a planned step are the same in every step. So each stage keeps the requests that it will get.
The root stage compares each call with the program instead of sending it. When all calls of a group have come
as expected, it sends the tensors that it contributes, with the number of the group. They stand for all requests of
the group. A stage that gets no tensor from the root stage learns of the group by the first tensor that another stage
of the group sends it.

A stage may rely on such a tensor only if all its calls in the group need it. Then it is ready to run exactly the
same tasks as with requests, at every moment. Pipelines that must leave a planned order together rely on this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from smp_runtime.pipeline.transport.messages import BackwardCall, ForwardCall
from smp_runtime.tensors.remote_tensor import Path

#: The first call of a longer group is a group of its own, so that its stage need not wait for the others.
MOST_HELD = 4
#: Processor time of the step function between two calls, in seconds, after which they are not in one group. Calls are held
#: back until their group is complete, and other stages must not wait while the root stage computes.
LONGEST_HOLD = 0.003

#: A call of one microbatch: ``"F"`` or ``"B"``, and its call numbers.
CallKey = tuple[str, Path]


class PostedCall(NamedTuple):
    """A request that the step function has posted."""

    stage: int  # that it goes to
    message: ForwardCall | BackwardCall
    part: int  # segment of the step function's task
    when: float  # processor time of its thread

    @property
    def key(self) -> CallKey:
        """Return the key of the call among those of its microbatch."""
        return key_of(self.message)


class CallGroup(NamedTuple):
    """Calls that begin together."""

    number: int
    calls: tuple[PostedCall, ...]
    told: tuple[int, ...]  # stages that the root stage sends a message
    reached: frozenset[int]  # stages with calls of the group


@dataclass(frozen=True)
class StepProgram:
    """The calls of one kind of step.

    Attributes:
        groups: by microbatch, in the order in which they begin.
    """

    groups: Mapping[int, Sequence[CallGroup]]

    def of_stage(self, stage: int) -> tuple[tuple[int, tuple[ForwardCall | BackwardCall, ...]], ...]:
        """Return a stage's part: numbers of groups, and the requests of each; their tensors come separately."""
        found = []
        for groups in self.groups.values():
            for group in groups:
                messages = [call.message._replace(inline=()) for call in group.calls if call.stage == stage]
                if messages:
                    found.append((group.number, tuple(messages)))
        return tuple(found)

    def keys_of(self, stage: int, microbatch: int) -> list[CallKey]:
        """Return the calls of one microbatch that go to a stage."""
        groups = self.groups.get(microbatch, ())
        return [call.key for group in groups for call in group.calls if call.stage == stage]


def key_of(message: ForwardCall | BackwardCall) -> CallKey:
    """Return the key of a request among those of its microbatch."""
    return "F" if isinstance(message, ForwardCall) else "B", message.path


def make_program(calls: Mapping[int, Sequence[PostedCall]]) -> StepProgram:
    """Make a program from the calls that the step function has posted, by microbatch."""
    groups: dict[int, list[CallGroup]] = {}
    number = 0
    for microbatch in sorted(calls):
        groups[microbatch] = []
        for members in _split(calls[microbatch]):
            reached = frozenset(call.stage for call in members)
            groups[microbatch].append(CallGroup(number, tuple(members), _told(members), reached))
            number += 1
    return StepProgram(groups)


def _split(calls: Sequence[PostedCall]) -> list[list[PostedCall]]:
    """Split the calls of a microbatch where the step function waits or computes."""
    runs: list[list[PostedCall]] = []
    for call in calls:
        last = runs[-1][-1] if runs else None
        goes_on = last is not None and last.part == call.part and call.when - last.when < LONGEST_HOLD
        if goes_on:
            runs[-1].append(call)
        else:
            runs.append([call])
    parts: list[list[PostedCall]] = []
    for run in runs:
        if len(run) > MOST_HELD:
            parts += [run[:1], run[1:]]
        else:
            parts.append(run)
    return parts


def _told(calls: Sequence[PostedCall]) -> tuple[int, ...]:
    """Return the stages that learn of a group only from the root stage."""
    index = {call.key: position for position, call in enumerate(calls)}
    needs: list[set[int]] = []
    for call in calls:
        direct = _makers(call, index)
        needs.append(direct.union(*(needs[position] for position in direct)))
    told = []
    for stage in sorted({call.stage for call in calls}):
        mine = [position for position, call in enumerate(calls) if call.stage == stage]
        gets_tensors = any(calls[position].message.inline for position in mine)
        if gets_tensors or not _is_told_by_another(mine, calls, needs, index):
            told.append(stage)
    return tuple(told)


def _makers(call: PostedCall, index: Mapping[CallKey, int]) -> set[int]:
    """Return the positions of the calls of a group that make a tensor which this call waits for."""
    found = set()
    for slot in call.message.slots:
        if slot is None or not slot.comes:
            continue
        kind, microbatch, path, _ = slot.name
        # A handle that the script has kept may be of another microbatch.
        if microbatch == call.message.microbatch and (kind, path) in index:
            found.add(index[kind, path])
    return found


def _is_told_by_another(
    mine: Sequence[int], calls: Sequence[PostedCall], needs: Sequence[set[int]], index: Mapping[CallKey, int]
) -> bool:
    """Return whether another stage sends this one a tensor of the group unasked, which all its calls need."""
    first = calls[mine[0]]
    for maker in sorted(_makers(first, index)):
        kind, path = calls[maker].key
        sent = {(kind, path, number) for number, stage in calls[maker].message.goes if stage == first.stage}
        comes = any(
            slot is not None and slot.comes and (slot.name[0], slot.name[2], slot.name[3]) in sent
            for slot in first.message.slots
        )
        all_need_it = all(position == mine[0] or maker in needs[position] for position in mine)
        if comes and all_need_it and calls[maker].stage != first.stage:
            return True
    return False
