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
    all_wait = all(p.standing is Standing.WAITING and p.whom for p in everyone)
    return all_wait and len({p.call for p in everyone}) > 1


def _stopped(position: RankPosition) -> str:
    return (
        f"{position.doing} since {position.seconds:.0f} s, {describe_moment(position.where)}, last seen at {position.at()}; "
        "kill -CONT "
        f"{position.where.pid} lets it go on"
    )


def _of_script(in_script: Sequence[RankPosition], everyone: Sequence[RankPosition]) -> HangVerdict:
    """Return the verdict if some ranks are in the script's code: blame a rank that others wait for.

    A rank that does not compute comes first, then the one that has been there longest.
    """
    awaited = {rank for p in everyone for rank in p.whom}
    blamed = [p for p in in_script if p.rank in awaited] or list(in_script)
    # On a GPU collectives are queued, and a rank waits for them wherever it reads a value: it is ahead of one that has not come.
    blamed = [p for p in blamed if not any(_is_ahead(p, other) for other in blamed)] or blamed
    # If ranks wait for one that computes and another that does not, blame the second: it cannot arrive.
    first = min(blamed, key=lambda p: (p.is_active, -p.seconds, p.rank))
    others = [p for p in in_script if p.rank != first.rank and p.line == first.line]
    also = f" (and so {_ranks(p.rank for p in others)})" if others else ""
    doing = "computes, or moves data, but does not go on" if first.is_active else first.doing or "does not go on"
    text = f"has been at {first.at()} for {first.seconds:.0f} s{also}, {describe_moment(first.where)}: it {doing}"
    return HangVerdict(
        first.rank,
        text + _waiting(everyone, {p.rank for p in in_script}),
        is_certain=not (first.is_active or first.is_compiling),
    )


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
                f"has ended its script after {theirs.step} steps, while rank {waiting.rank} waits for it in {waiting.call}, at "
                f"{waiting.at()}, in step {ours.step}; let all ranks run the same number of steps (drop_last=True, a sampler with "
                "as many samples for each rank), or train in `with model.join():`",
            )
    return None


def _mismatch(positions: Mapping[int, RankPosition]) -> HangVerdict | None:
    """Return the verdict if ranks of a group called different collectives, or one with different tensors, else None."""
    for members, number in _open_collectives(positions):
        calls = {rank: call for rank in members if (call := _collective(positions, rank, members, number)) is not None}
        kinds = Counter(call.content for call in calls.values())
        if len(kinds) > 1:
            odd = _deviant(calls, lambda call: call.content)
            other = next(rank for rank in calls if calls[rank].content != calls[odd].content)
            return HangVerdict(
                odd,
                f"has called {calls[odd].content} at {positions[odd].at()}, but rank {other} {calls[other].content} at "
                f"{positions[other].at()}, as collective {number} of ranks {ranks_text(members)}; all ranks of a group must make "
                "the same calls, with tensors of the same shape",
            )
    return None


def _missing_collective(positions: Mapping[int, RankPosition]) -> HangVerdict | None:
    """Return the verdict if a rank waits elsewhere and has not begun its group's collective, else None."""
    for members, number in _open_collectives(positions):
        behind = [
            rank
            for rank in members
            if rank in positions and _count(positions[rank].where, members) < number and positions[rank].seconds
        ]
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
                f"has not made the call {first.call} that rank {first.rank} made at {first.at()}: it waits in {late.call} at "
                f"{late.at()}, {describe_moment(late.where)}; all ranks of {ranks_text(members)} must make the same calls in "
                "the same order",
            )
    return None


def _other_call(positions: Mapping[int, RankPosition]) -> HangVerdict | None:
    """Return the verdict if ranks called different functions of this library as their n-th call, else None."""
    public = {rank: {c.number: c for c in p.where.calls if c.kind == PUBLIC} for rank, p in positions.items()}
    numbers = sorted(set.union(*(set(calls) for calls in public.values()))) if public else []
    for number in numbers:
        calls = {rank: found[number] for rank, found in public.items() if number in found}
        if len({call.name for call in calls.values()}) < 2:
            continue
        odd = _deviant(calls, lambda call: call.name)
        other = next(rank for rank in calls if calls[rank].name != calls[odd].name)
        # Of two ranks, if the next call of one is the present call of the other, then the other has left a call out.
        goes_on_as_other = _next_name(public[odd], number) == calls[other].name
        if len(calls) == 2 and goes_on_as_other and _next_name(public[other], number) != calls[odd].name:
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
    lines = Counter((p.call, p.line) for p in everyone)
    first = min(everyone, key=lambda p: (lines[p.call, p.line], -p.rank))
    text = f"has waited in {first.call or 'a call'} at {first.at()} for {first.seconds:.0f} s, {describe_moment(first.where)}"
    others = [p for p in everyone if p.rank != first.rank]
    if len(lines) == 1 and others:
        text += f"; all ranks wait there for {seconds:.0f} s: the connection between them may be broken"
    is_certain = not any(p.is_active for p in everyone)
    return HangVerdict(first.rank, text + _waiting(everyone, {first.rank}), is_certain)


def _open_collectives(positions: Mapping[int, RankPosition]) -> list[tuple[tuple[int, ...], int]]:
    """Return group and number of the collectives in which ranks wait, those of the smallest number first."""
    found = {(p.wait.whom, p.wait.number) for p in positions.values() if p.wait is not None and p.wait.number}
    return sorted(found, key=lambda pair: (pair[1], pair[0]))


def _collective(
    positions: Mapping[int, RankPosition], rank: int, members: tuple[int, ...], number: int
) -> JoinedCall | None:
    calls: Iterable[JoinedCall] = positions[rank].where.calls if rank in positions else ()
    return next(
        (c for c in calls if c.kind == COLLECTIVE and c.members == members and c.number == number),
        None,
    )


def _count(where: RankRecord, members: tuple[int, ...]) -> int:
    """Return how many collectives of a group a rank has begun, according to its record."""
    return max((c.number for c in where.calls if c.kind == COLLECTIVE and c.members == members), default=0)


def _is_ahead(position: RankPosition, other: RankPosition) -> bool:
    """Return whether a rank has begun a collective that another rank of the same group has not."""
    groups = {call.members for call in position.where.calls if call.kind == COLLECTIVE and other.rank in call.members}
    return any(_count(position.where, members) > _count(other.where, members) for members in groups)


def _deviant(calls: Mapping[int, JoinedCall], key: Callable[[JoinedCall], str]) -> int:
    """Return the rank that made the rarest call; of several such ranks, the last."""
    votes = Counter(key(call) for call in calls.values())
    return min(calls, key=lambda rank: (votes[key(calls[rank])], -rank))


def _next_name(calls: Mapping[int, JoinedCall], number: int) -> str:
    return calls[number + 1].name if number + 1 in calls else ""


def _waiting(everyone: Iterable[RankPosition], apart: Collection[int]) -> str:
    """Describe which ranks wait where, for the end of a sentence."""
    places: dict[str, list[int]] = defaultdict(list)
    for p in everyone:
        if p.rank not in apart and p.standing is Standing.WAITING:
            places[f"in {p.call or 'a call'} at {p.line or 'no line of the script'}"].append(p.rank)
    told = [f"{_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} {place}" for place, ranks in places.items()]
    more = f"; and {len(told) - _SHOWN_GROUPS} more" if len(told) > _SHOWN_GROUPS else ""
    return "; " + "; ".join(told[:_SHOWN_GROUPS]) + more if told else ""


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank{'s' * (len(listed) > 1)} {ranks_text(listed)}"
