"""The reason why a job hangs: the rank that others wait for, and its line of the script, from all ranks' positions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from smp_config.formats.rank_lists import ranks_text
from smp_launch.watch.position import RankPosition, Standing, describe_moment
from smp_records.rank_record import COLLECTIVE, PUBLIC, JoinedCall, RankRecord

#: Groups of waiting ranks that a headline names.
_SHOWN_GROUPS = 3


@dataclass(frozen=True)
class HangVerdict:
    """The reason why a job hangs.

    Attributes:
        rank: the rank that is most probably at fault; None if no rank is.
        text: one line: what this rank does, where, and which ranks wait for it.
        is_certain: whether the rank is stuck for certain; otherwise it may only be slow, and computes or moves data.
        is_deadlock: whether ranks wait for each other in different calls, which no time resolves.
    """

    rank: int | None
    text: str
    is_certain: bool = True
    is_deadlock: bool = False


def find(positions: Mapping[int, RankPosition], seconds: float) -> HangVerdict:
    """Return the verdict over ranks that do not go on.

    Args:
        positions: positions of all known ranks that do not go on, by rank.
        seconds: seconds without any progress.
    """
    everyone = list(positions.values())
    stopped = [p for p in everyone if p.standing is Standing.STOPPED]
    if stopped:
        first = max(stopped, key=lambda p: p.seconds)
        return HangVerdict(first.rank, _stopped(first) + _waiting(everyone, {p.rank for p in stopped}))
    if (short := _uneven(positions)) is not None:
        return short
    in_script = [p for p in everyone if p.standing is Standing.SCRIPT]
    if in_script:
        return _of_script(in_script, everyone)
    for judge in (_mismatch, _missing_collective, _other_call):
        if (found := judge(positions)) is not None:
            return replace(found, is_deadlock=_is_deadlock(everyone))
    return _circle(everyone, seconds)


def _is_deadlock(everyone: Collection[RankPosition]) -> bool:
    """Return whether all ranks wait for each other in different calls, so that none can come to the other's."""
    calls = set()
    for position in everyone:
        if position.standing is not Standing.WAITING or not position.whom:
            return False
        calls.add(position.call)
    return len(calls) > 1


def _stopped(position: RankPosition) -> str:
    return (
        f"{position.doing} since {position.seconds:.0f} s, {describe_moment(position.where)}, last seen {position.at()}; "
        "kill -CONT "
        f"{position.where.pid} lets it go on"
    )


def _of_script(in_script: Sequence[RankPosition], everyone: Sequence[RankPosition]) -> HangVerdict:
    """Return the verdict if some ranks are in the script's code: blame a rank that others wait for.

    A rank that does not compute comes first, then the one that has been there longest.
    """
    first = _blamed(in_script, everyone)
    others = [p.rank for p in in_script if p.rank != first.rank and p.line == first.line]
    also = f" (and so {_ranks(others)})" if others else ""
    doing = first.doing or "does not go on"
    if first.is_active:
        doing = "computes, or moves data, but does not go on"
    text = f"has been {first.at()} for {first.seconds:.0f} s{also}, {describe_moment(first.where)}: it {doing}"
    waiting = _waiting(everyone, {p.rank for p in in_script})
    is_uncertain = first.is_active or first.is_compiling
    return HangVerdict(first.rank, text + waiting, is_certain=not is_uncertain)


def _blamed(in_script: Sequence[RankPosition], everyone: Sequence[RankPosition]) -> RankPosition:
    """Return the rank in the script's code that holds the others up."""
    awaited: set[int] = set()
    for position in everyone:
        awaited.update(position.whom)
    candidates = [p for p in in_script if p.rank in awaited] or list(in_script)
    # On a GPU collectives are queued, and a rank waits for them wherever it reads a value: it is ahead of one that has not come.
    behind = [p for p in candidates if not any(_is_ahead(p, other) for other in candidates)]

    # If ranks wait for one that computes and another that does not, blame the second: it cannot arrive.
    def order(position: RankPosition) -> tuple[bool, float, int]:
        return position.is_active, -position.seconds, position.rank

    return min(behind or candidates, key=order)


def _uneven(positions: Mapping[int, RankPosition]) -> HangVerdict | None:
    """Return the verdict if a rank has ended its script while others wait for it, else None."""
    gone = {p.rank for p in positions.values() if p.standing is Standing.LEFT}
    for waiting in positions.values():
        missed = gone.intersection(waiting.whom)
        if waiting.standing is Standing.WAITING and missed:
            rank = min(missed)
            theirs, ours = positions[rank].where, waiting.where
            return HangVerdict(
                rank,
                f"has ended its script after {theirs.step} steps, while rank {waiting.rank} waits for it in {waiting.call}, "
                f"{waiting.at()}, in step {ours.step}; let all ranks run the same number of steps (drop_last=True, a sampler with "
                "as many samples for each rank), or train in `with model.join():`",
            )
    return None


def _mismatch(positions: Mapping[int, RankPosition]) -> HangVerdict | None:
    """Return the verdict if ranks of a group called different collectives, or one with different tensors, else None."""
    for members, number in _open_collectives(positions):
        calls = {}
        for rank in members:
            call = _collective(positions, rank, members, number)
            if call is not None:
                calls[rank] = call
        kinds = Counter(call.content for call in calls.values())
        if len(kinds) > 1:
            odd = _deviant(calls, lambda call: call.content)
            other = next(rank for rank in calls if calls[rank].content != calls[odd].content)
            return HangVerdict(
                odd,
                f"has called {calls[odd].content} {positions[odd].at()}, but rank {other} {calls[other].content} "
                f"{positions[other].at()}, as collective {number} of ranks {ranks_text(members)}; all ranks of a group must make "
                "the same calls, with tensors of the same shape",
            )
    return None


def _missing_collective(positions: Mapping[int, RankPosition]) -> HangVerdict | None:
    """Return the verdict if a rank waits elsewhere and has not begun its group's collective, else None."""
    for members, number in _open_collectives(positions):
        behind = []
        for rank in members:
            position = positions.get(rank)
            if position is not None and position.seconds and _count(position.where, members) < number:
                behind.append(rank)
        waiting = [p for p in positions.values() if p.wait and (p.wait.whom, p.wait.number) == (members, number)]
        if behind and waiting:
            # It may have made another call than the rank that waits for it, or than the ranks that it waits for itself.
            for others in ([waiting[0].rank], positions[behind[0]].whom):
                involved = {rank: positions[rank] for rank in (behind[0], *others) if rank in positions}
                if (public := _other_call(involved)) is not None:
                    return public
            late, first = positions[behind[0]], waiting[0]
            return HangVerdict(
                late.rank,
                f"has not made the call {first.call} that rank {first.rank} made {first.at()}: it waits in {late.call} "
                f"{late.at()}, {describe_moment(late.where)}; all ranks of {ranks_text(members)} must make the same calls in "
                "the same order",
            )
    return None


def _other_call(positions: Mapping[int, RankPosition]) -> HangVerdict | None:
    """Return the verdict if ranks called different functions of this library as their n-th call, else None."""
    public: dict[int, dict[int, JoinedCall]] = {}
    for rank, position in positions.items():
        public[rank] = {call.number: call for call in position.where.calls if call.kind == PUBLIC}
    numbers = {number for calls in public.values() for number in calls}
    for number in sorted(numbers):
        calls = {rank: found[number] for rank, found in public.items() if number in found}
        names = {call.name for call in calls.values()}
        if len(names) < 2:
            continue
        odd = _deviant(calls, lambda call: call.name)
        other = next(rank for rank in calls if calls[rank].name != calls[odd].name)
        if len(calls) == 2:
            # Of two ranks, if the next call of one is the present call of the other, then the other has left a call out.
            goes_on_as_other = _next_name(public[odd], number) == calls[other].name
            other_goes_on = _next_name(public[other], number) == calls[odd].name
            if goes_on_as_other and not other_goes_on:
                odd, other = other, odd
        made, missed = calls[odd], calls[other]
        return HangVerdict(
            odd,
            f"has called {made.name} at {made.line}, where rank {other} called {missed.name} at {missed.line}: it has left that "
            "call out, or made one that the others have not; make the same calls on every rank: look for an `if` on the rank",
        )
    return None


def _circle(everyone: Sequence[RankPosition], seconds: float) -> HangVerdict:
    """Return the verdict if all ranks wait and no rank is known to be at fault."""
    places = Counter((position.call, position.line) for position in everyone)

    def order(position: RankPosition) -> tuple[int, int]:
        return places[position.call, position.line], -position.rank

    first = min(everyone, key=order)
    text = (
        f"has waited in {first.call or 'a call'} {first.at()} for {first.seconds:.0f} s, {describe_moment(first.where)}"
    )
    if len(places) == 1 and len(everyone) > 1:
        text += f"; all ranks wait there for {seconds:.0f} s: the connection between them may be broken"
    any_active = any(position.is_active for position in everyone)
    return HangVerdict(first.rank, text + _waiting(everyone, {first.rank}), is_certain=not any_active)


def _open_collectives(positions: Mapping[int, RankPosition]) -> list[tuple[tuple[int, ...], int]]:
    """Return group and number of the collectives in which ranks wait, those of the smallest number first."""
    found = {(p.wait.whom, p.wait.number) for p in positions.values() if p.wait is not None and p.wait.number}
    return sorted(found, key=lambda pair: (pair[1], pair[0]))


def _collective(
    positions: Mapping[int, RankPosition], rank: int, members: tuple[int, ...], number: int
) -> JoinedCall | None:
    if rank not in positions:
        return None
    for call in positions[rank].where.calls:
        is_wanted = call.kind == COLLECTIVE and call.number == number
        if is_wanted and call.members == members:
            return call
    return None


def _count(where: RankRecord, members: tuple[int, ...]) -> int:
    """Return how many collectives of a group a rank has begun, according to its record."""
    numbers = [call.number for call in where.calls if call.kind == COLLECTIVE and call.members == members]
    return max(numbers, default=0)


def _is_ahead(position: RankPosition, other: RankPosition) -> bool:
    """Return whether a rank has begun a collective that another rank of the same group has not."""
    for call in position.where.calls:
        if call.kind != COLLECTIVE or other.rank not in call.members:
            continue
        begun = _count(position.where, call.members)
        begun_by_other = _count(other.where, call.members)
        if begun > begun_by_other:
            return True
    return False


def _deviant(calls: Mapping[int, JoinedCall], key: Callable[[JoinedCall], str]) -> int:
    """Return the rank that made the rarest call; of several such ranks, the last."""
    votes = Counter(key(call) for call in calls.values())
    return min(calls, key=lambda rank: (votes[key(calls[rank])], -rank))


def _next_name(calls: Mapping[int, JoinedCall], number: int) -> str:
    return calls[number + 1].name if number + 1 in calls else ""


def _waiting(everyone: Iterable[RankPosition], apart: Collection[int]) -> str:
    """Describe which ranks wait where, for the end of a sentence."""
    places: dict[str, list[int]] = defaultdict(list)
    for position in everyone:
        is_waiting = position.standing is Standing.WAITING
        if is_waiting and position.rank not in apart:
            call = position.call or "a call"
            line = position.line or "no line of the script"
            places[f"in {call} at {line}"].append(position.rank)
    if not places:
        return ""
    groups = []
    for place, ranks in places.items():
        verb = "waits" if len(ranks) == 1 else "wait"
        groups.append(f"{_ranks(ranks)} {verb} {place}")
    text = "; " + "; ".join(groups[:_SHOWN_GROUPS])
    hidden = len(groups) - _SHOWN_GROUPS
    return f"{text}; and {hidden} more" if hidden > 0 else text


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank{'s' * (len(listed) > 1)} {ranks_text(listed)}"
