"""Reports of a hang, for people and for programs: the failure's words, and the report with all stacks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_config.formats.rank_lists import ranks_text
from smp_config.limits import HANG_VARIABLE
from smp_launch.failures.failure import Cause
from smp_launch.watch import stacks
from smp_launch.watch.position import Standing, describe_moment, position_of
from smp_launch.watch.states import State
from smp_records import rank_record

if TYPE_CHECKING:
    from smp_launch.watch.position import RankPosition
    from smp_launch.watch.watch import Hang

#: In the folder of the job's output.
TEXT_NAME = "hang-report.txt"
JSON_NAME = "hang-report.json"

#: Of an error of a rank that gives up waiting: a hang is the same, seen from outside.
_ERROR_CODE = "SMP501"

#: Calls of each rank that the report has.
_CALLS = 8


def cause_of_hang(hang: Hang, host_of: Callable[[int], str]) -> Cause:
    """Return the failure of a job that hangs."""
    rank = hang.verdict.rank
    who = "hang" if rank is None else f"rank {rank} ({host_of(rank)}): hang"
    detail = (
        f"Nothing went on for {hang.seconds:.0f} s. The calls and stacks of all ranks are in {TEXT_NAME} in the job's output; "
        f"{HANG_VARIABLE} sets another number of seconds, or 0 for no watch.\n\n" + summarize(hang.positions)
    )
    return Cause(f"{who}: {hang.verdict.text} [{_ERROR_CODE}]", detail, rank=rank)


def summarize(positions: Mapping[int, RankPosition]) -> str:
    """Return a line for each rank."""
    return "\n".join(describe(position) for position in positions.values())


def describe(position: RankPosition) -> str:
    """Describe in one line where a rank stands."""
    where = position.where
    step = f"step {where.step}, " if where.step else ""
    if position.standing is Standing.WAITING:
        doing = f"waits in {position.call}"
        if position.whom:
            doing += f" for {_listed(position.whom)}"
    else:
        doing = position.doing or "goes on"
    return f"rank {position.rank}: {step}{where.phase}, {position.seconds:.0f} s: {doing}, {position.at()}"


def last_seen(folder: Path) -> dict[int, str]:
    """Return where each ended rank was, as in ``in backward of step 30, last seen at train.py:40 (…)``.

    Ranks without a note are left out.
    """
    found = {}
    for rank, where in rank_record.read_all(folder).items():
        if not where.step and not where.line:
            continue
        threads = stacks.left_by_crash(folder, rank)
        position = position_of(where, State("S"), threads, where.when, is_active=False)
        # Without stacks of the crash, the place is the last one that the rank noted.
        seen = "" if threads else "last seen "
        found[rank] = f"{describe_moment(where)}, {seen}{position.at()}"
    return found


def last_step(folder: Path, rank: int | None) -> int | None:
    """Return the step that a rank had begun when it ended, or None before the first step.

    If the rank has no record here, return the step of the rank that came furthest.
    """
    steps = {}
    for path in folder.iterdir():
        if not path.name.isdecimal():
            continue
        glance = rank_record.read_glance(path)
        if glance is not None:
            steps[int(path.name)] = glance.step
    furthest = max(steps.values(), default=0)
    step = furthest if rank is None else steps.get(rank, furthest)
    return step or None


def write_report(folder: Path, hang: Hang) -> Path | None:
    """Write the report in both forms; return the text's path, or None if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JSON_NAME).write_text(json.dumps(_content(hang), indent=1), encoding="utf-8", errors="replace")
        path = folder / TEXT_NAME
        path.write_text(text_of(hang), encoding="utf-8", errors="replace")
    except OSError:
        return None  # the log has the verdict in any case
    return path


def text_of(hang: Hang) -> str:
    """Return the report for people."""
    rank = hang.verdict.rank
    lines = [f"{'' if rank is None else f'rank {rank} '}{hang.verdict.text}", "", summarize(hang.positions)]
    for position in hang.positions.values():
        lines += ["", f"== rank {position.rank}, process {position.where.pid} =="]
        for wait in position.where.waits:
            lines.append(f"waits in {wait.what} for {_listed(wait.whom)}, since {position.seconds:.0f} s")
        for call in position.where.calls[-_CALLS:]:
            of = f" (the {call.number}th of {_listed(call.members)})" if call.members else ""
            lines.append(f"call {call.position}: {call.content}{of}" + (f" at {call.line}" if call.line else ""))
        for thread in position.threads:
            main = " (main)" if thread.ident == position.where.main_thread else ""
            lines += [
                f"thread {thread.ident:#x}{main}, innermost call first:",
                *(f"  {frame}" for frame in thread.frames),
            ]
        if not position.threads:
            lines.append("no stacks: the process could not write them")
    return "\n".join(lines) + "\n"


def _content(hang: Hang) -> dict[str, Any]:
    """Return the report for programs."""
    return {
        "rank": hang.verdict.rank,
        "text": hang.verdict.text,
        "certain": hang.verdict.is_certain,
        "seconds": hang.seconds,
        "ranks": [_content_of_rank(position) for position in hang.positions.values()],
    }


def _content_of_rank(position: RankPosition) -> dict[str, Any]:
    threads = []
    for thread in position.threads:
        frames = [dataclasses.asdict(frame) for frame in thread.frames]
        threads.append({"ident": thread.ident, "frames": frames})
    return {
        "rank": position.rank,
        "pid": position.where.pid,
        "standing": position.standing.value,
        "seconds": position.seconds,
        "step": position.where.step,
        "microbatch": position.where.microbatch,
        "phase": position.where.phase,
        "file": position.line.file,
        "line": position.line.number,
        "doing": position.doing,
        "call": position.call,
        "waits": [dataclasses.asdict(wait) for wait in position.where.waits],
        "calls": [dataclasses.asdict(call) for call in position.where.calls[-_CALLS:]],
        "threads": threads,
    }


def _listed(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {ranks_text(ranks)}"
