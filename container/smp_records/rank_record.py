"""The record of a rank's position, in a small mapped file that observers of the job read from outside.

The rank writes as it goes, without a lock and without a system call. The reader needs nothing of the rank, not even
that it runs. A record has the step and its phase, and the last calls that other ranks must make too (each with the
script's line). It also has the open waits for other ranks, and the time of the last change. Times are those of the
machine's monotonic clock, so that they can be compared between its processes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from smp_config.formats.rank_lists import ranks_of, ranks_text
from smp_config.recovery import restart_count
from smp_records import time_breakdown
from smp_records.positions import COLLECTIVE, PUBLIC, Glance, JoinedCall, RankRecord, ScriptLine, Waiting
from smp_records.script_lines import script_line

#: Names the folder for the records of a machine's ranks, as ``<rank>``; without it they keep none.
FOLDER_VARIABLE = "SMP_WHEREABOUTS"

#: Makes a rank write the stacks of its threads into ``<rank>.stacks``, in any state. None if the system lacks the signal.
STACKS_SIGNAL: int | None = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None
STACKS_SUFFIX = ".stacks"

#: Phases of a rank. Between two steps it is the script's turn, which mostly means that data is loaded.
START, BETWEEN, FORWARD, BACKWARD, REDUCTION, OPTIMIZER, SAVE = (
    "start",
    "between steps",
    "forward",
    "backward",
    "reduction",
    "optimizer",
    "save",
)

#: The kind of time that each phase counts as.
_KIND_OF = {
    START: time_breakdown.START,
    BETWEEN: time_breakdown.BETWEEN,
    FORWARD: time_breakdown.STEP,
    BACKWARD: time_breakdown.STEP,
    REDUCTION: time_breakdown.REDUCTION,
    OPTIMIZER: time_breakdown.UPDATE,
    SAVE: time_breakdown.SAVE,
}

#: Begins a record; another version of the layout has another number.
_MAGIC = b"smp-at-4"
_HEAD = struct.Struct("<8sIIQ")  # magic, process, rank, identifier of the main thread
# When, steps begun, microbatch, phase, how it has left, long phase and its end.
_STATE = struct.Struct("<dQqIIId")
_WAIT = struct.Struct("<ddIIII")  # when, since or 0, call, awaited ranks, file, line
# When, waited for since or 0, position from 1, kind, name, file, line, members, number, size, type.
_CALL = struct.Struct("<ddQIIIIIQQI")
_TIMES = struct.Struct("<dd")  # how waits and calls begin
_WHEN = struct.Struct("<d")  # how all three begin
_CELL = struct.Struct("<H")

#: Where the parts of a record begin.
_STATE_AT, _PACE_AT, _WAITS_AT = 64, 128, 512

#: How many waits, calls and cells a record holds, and the bytes of a cell.
_WAITS, _CALLS, _CELLS, _CELL_BYTES = 32, 128, 480, 256
_CALLS_AT = _WAITS_AT + _WAITS * _WAIT.size
_CELLS_AT = (_CALLS_AT + _CALLS * _CALL.size + 255) // 256 * 256
_BYTES = _CELLS_AT + _CELLS * _CELL_BYTES


class Notes:
    """The record of this process; without a file it records nothing.

    Attributes:
        on_phase: called with each phase that the rank enters, and the number of its step.
        explain: returns an error of this library that explains an error, or None if it cannot explain it.
        on_step: called when a step begins.
        pace: how the process spends its time.
    """

    def __init__(self, path: Path | None = None, rank: int = 0) -> None:
        self.on_phase: Callable[[str, int], None] | None = None
        self.step = 0
        self.explain: Callable[[BaseException], BaseException | None] | None = None
        self.on_step: Callable[[], None] | None = None
        self.pace = time_breakdown.TimeBreakdown()
        self._began: dict[int, float] = {}  # of open waits; those of collectives by position, others below 0
        self._map: mmap.mmap | None = None
        self._has_steps = False
        self._long = ""
        self._left = ""
        self._long_until = 0.0
        self._phase = START
        self._microbatch = -1
        # Counters of the interpreter count without a lock, in signal handlers too.
        self._positions, self._cells, self._publics = itertools.count(), itertools.count(1), itertools.count(1)
        self._free = list(range(_WAITS))
        self._last = 0
        self._texts: dict[str, int] = {"": 0}
        self._members: dict[tuple[int, ...], int] = {}
        if path is not None:
            with open(path, "x+b", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.truncate(_BYTES)
                # Memory that outlives the process: the launcher reads it after a rank was killed.
                self._map = mmap.mmap(file.fileno(), _BYTES)
            _HEAD.pack_into(self._map, 0, _MAGIC, os.getpid(), rank, threading.main_thread().ident or 0)
            self._write_state()
            self.pace.keep_in(self._map, _PACE_AT)

    @property
    def are_kept(self) -> bool:
        """Return whether the record has a file, so that others can read it."""
        return self._map is not None

    # -- events of the rank ------------------------------------------------------------------------------------------

    def move(self) -> None:
        """Record a sign of life."""
        self._write_state()

    def begin_step(self) -> None:
        """Record that the next step begins."""
        self.step += 1
        self._has_steps = True
        if self.on_step is not None:
            self.on_step()
        self.pace.begin_step()
        self.enter(FORWARD)

    def go_on(self, step: int) -> None:
        """Set the number of steps that the training had begun before its ranks were started again."""
        self.step = step
        self._write_state()

    def update(self) -> None:
        """Record an optimizer update. In a script without step functions, updates count as steps."""
        if not self._has_steps:
            self.step += 1
            self.pace.begin_step()
            self.pace.enter(time_breakdown.UPDATE)
        self.pace.updated()

    def enter(self, phase: str, microbatch: int = -1) -> None:
        """Record that the rank enters a phase of its step."""
        self._phase, self._microbatch = phase, microbatch
        self.pace.enter(_KIND_OF[phase])
        self._write_state()
        if self.on_phase is not None:
            self.on_phase(phase, self.step)

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Record a phase for the block, and the former phase after it."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self._phase, self._microbatch = before, -1
            # In a script without steps the next one begins with a call of the model.
            self.pace.enter(time_breakdown.BETWEEN if phase == OPTIMIZER else _KIND_OF[before])
            self._write_state()

    def leave(self, how: str) -> None:
        """Record that the rank leaves the job."""
        self._left = how
        self._write_state()

    @contextlib.contextmanager
    def long_phase(self, what: str, seconds: float) -> Iterator[None]:
        """Announce that the script's own work in the block may take ``seconds`` without a sign of life."""
        before = self._long, self._long_until
        self._long, self._long_until = what, time.monotonic() + seconds
        self._write_state()
        try:
            yield
        finally:
            self._long, self._long_until = before
            self._write_state()

    def call(self, name: str) -> None:
        """Record a call of the script that other ranks make too."""
        if self._map is not None:
            file, line = script_line(2)
            position, now = next(self._positions), time.monotonic()
            at = _CALLS_AT + position % _CALLS * _CALL.size
            values = self.text(name), self.text(file), line, 0, next(self._publics), 0, 0
            _CALL.pack_into(self._map, at, now, 0.0, position + 1, PUBLIC, *values)

    def collective(self, name: int, members: int, number: int, size: int, dtype: int) -> int:
        """Record that a collective begins.

        Its line is not looked for, because that would cost more than all else. While the rank is in it, the stack has it.

        Args:
            name: the cell that :meth:`text` returns.
            members: the cell that :meth:`ranks` returns.
            number: number of the collective in this group.
            size: elements of its tensor.
            dtype: the cell that :meth:`text` returns.

        Returns:
            The position for :meth:`begin_wait` and :meth:`end_wait`.
        """
        position = next(self._positions)
        if self._map is not None:
            at = _CALLS_AT + position % _CALLS * _CALL.size
            now = time.monotonic()
            _CALL.pack_into(self._map, at, now, 0.0, position + 1, COLLECTIVE, name, 0, 0, members, number, size, dtype)
            self._last = position
        return position

    def begin_wait(self, position: int) -> None:
        """Record that the rank waits for the end of a collective."""
        self._began[position] = time.monotonic()
        if self._map is not None and position > self._last - _CALLS:
            now = time.monotonic()
            _TIMES.pack_into(self._map, _CALLS_AT + position % _CALLS * _CALL.size, now, now)

    def end_wait(self, position: int) -> None:
        """Record that the collective has ended."""
        now = time.monotonic()
        self.pace.add_collective(now - self._began.pop(position, now))
        if self._map is not None and position > self._last - _CALLS:
            _TIMES.pack_into(self._map, _CALLS_AT + position % _CALLS * _CALL.size, now, 0.0)

    def open_wait(self, what: str, whom: tuple[int, ...]) -> int:
        """Record a wait for other ranks that is no collective, and return its slot for :meth:`close_wait`."""
        if self._map is None or not self._free:
            return -1
        slot = self._free.pop()
        file, line = script_line(2)
        self._began[-1 - slot] = now = time.monotonic()
        values = self.text(what), self.ranks(whom), self.text(file), line
        _WAIT.pack_into(self._map, _WAITS_AT + slot * _WAIT.size, now, now, *values)
        return slot

    def close_wait(self, slot: int) -> None:
        """Record that a wait is over."""
        if self._map is not None and slot >= 0:
            now = time.monotonic()
            self.pace.add_wait(now - self._began.pop(-1 - slot, now))
            _TIMES.pack_into(self._map, _WAITS_AT + slot * _WAIT.size, now, 0.0)
            self._free.append(slot)

    @contextlib.contextmanager
    def waiting(self, what: str, whom: tuple[int, ...]) -> Iterator[None]:
        """Record a wait for other ranks during the block."""
        slot = self.open_wait(what, whom)
        try:
            yield
        finally:
            self.close_wait(slot)

    # -- how it is written -------------------------------------------------------------------------------------------

    def _write_state(self) -> None:
        if self._map is not None:
            phase, left, long = self.text(self._phase), self.text(self._left), self.text(self._long)
            values = self.step, self._microbatch, phase, left, long, self._long_until
            _STATE.pack_into(self._map, _STATE_AT, time.monotonic(), *values)

    def ranks(self, members: tuple[int, ...]) -> int:
        """Return the number of the cell with the text for these ranks."""
        found = self._members.get(members)
        if found is None:
            found = self._members[members] = self.text(ranks_text(members))
        return found

    def text(self, text: str) -> int:
        """Return the number of the cell with a text. Each text is written once.

        If all cells are taken, a new text is not written, and its number is 0.
        """
        found = self._texts.get(text)
        if found is not None:
            return found
        cell = next(self._cells)
        if cell >= _CELLS or self._map is None:
            return 0
        # If a path is too long, keep its end, which is more specific.
        raw = text.encode("utf-8", "replace")[-(_CELL_BYTES - _CELL.size) :]
        at = _CELLS_AT + cell * _CELL_BYTES
        self._map[at : at + _CELL.size + len(raw)] = _CELL.pack(len(raw)) + raw
        self._texts[text] = cell
        return cell


#: Of this process; a fork's child goes on without.
_notes = Notes()


def current_record() -> Notes:
    """Return the record of this process."""
    return _notes


def long_phase(what: str, seconds: float) -> contextlib.AbstractContextManager[None]:
    """Announce that the script's own work in the block may take ``seconds`` without a step.

    The watch for hangs waits that long for this rank.

    Args:
        what: the work, for reports.
        seconds: how many it may take.

    Returns:
        A context.

    Example:
        >>> with smp.utils.long_phase("upload", seconds=1800):
        ...     pass
    """
    return _notes.long_phase(what, seconds)


def begin(environ: Mapping[str, str], rank: int) -> Notes:
    """Begin the record of this process, as rank ``rank``, if its job is watched and it has none yet.

    If this fails, nothing is recorded: a rank does not fail for want of a watch.
    """
    global _notes
    folder = environ.get(FOLDER_VARIABLE)
    if not folder or _notes.are_kept:
        return _notes
    try:
        if restart_count(environ):  # if another host has the launcher, the previous start's record is still there
            Path(folder, str(rank)).unlink(missing_ok=True)
            Path(folder, f"{rank}{STACKS_SUFFIX}").unlink(missing_ok=True)
        kept = Notes(Path(folder, str(rank)), rank)
        _ignore_stacks_signal()
        # Not closed: it is written by a signal's handler, until the process ends.
        stacks = os.open(Path(folder, f"{rank}{STACKS_SUFFIX}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    except OSError:
        return _notes
    if STACKS_SIGNAL is not None:
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    if not faulthandler.is_enabled():  # else the script's user wants to see them
        faulthandler.enable(file=stacks)  # a crash in native code leaves them, too
    kept.on_phase, kept.explain, _notes = _notes.on_phase, _notes.explain, kept
    os.register_at_fork(after_in_child=_forget)
    return kept


def _ignore_stacks_signal() -> None:
    """Ignore the signal for stacks while it has no handler: before it is registered, and when the interpreter ends."""
    if STACKS_SIGNAL is not None:
        with contextlib.suppress(ValueError):  # only the main thread may set this
            signal.signal(STACKS_SIGNAL, signal.SIG_IGN)


def _forget() -> None:
    global _notes
    _notes = Notes()


def read(path: Path) -> RankRecord | None:
    """Return a rank's record, or None if there is none, or none that is whole."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    if len(raw) != _BYTES or not raw.startswith(_MAGIC):
        return None

    def text(cell: int) -> str:
        at = _CELLS_AT + cell * _CELL_BYTES
        if not 0 < cell < _CELLS:
            return ""
        (size,) = _CELL.unpack_from(raw, at)
        return raw[at + _CELL.size : at + _CELL.size + size].decode("utf-8", "replace")

    calls, waits = [], []
    for index in range(_CALLS):
        found = _CALL.unpack_from(raw, _CALLS_AT + index * _CALL.size)
        when, since, position, kind, name, file, line, members, number, size, dtype = found
        if position:
            at, of = ScriptLine(text(file), line), ranks_of(text(members))
            calls.append(JoinedCall(position, when, kind, text(name), at, of, number, size, text(dtype)))
            if since:
                waits.append(Waiting(since, text(name), of, at, number))
    for slot in range(_WAITS):
        _, since, what, whom, file, line = _WAIT.unpack_from(raw, _WAITS_AT + slot * _WAIT.size)
        if since:
            waits.append(Waiting(since, text(what), ranks_of(text(whom)), ScriptLine(text(file), line)))
    _, pid, rank, main_thread = _HEAD.unpack_from(raw)
    _, step, microbatch, phase, left, long, long_until = _STATE.unpack_from(raw, _STATE_AT)
    return RankRecord(
        pid=pid,
        rank=rank,
        main_thread=main_thread,
        when=_last_change(raw),
        step=step,
        microbatch=microbatch,
        phase=text(phase),
        left=text(left),
        long=text(long),
        long_until=long_until,
        calls=tuple(sorted(calls, key=lambda call: call.position)),
        waits=tuple(sorted(waits, key=lambda wait: wait.since)),
    )


def read_glance(path: Path) -> Glance | None:
    """Read only the glance of a record; return None if there is no record."""
    try:
        with path.open("rb") as file:
            raw = file.read(_CELLS_AT)
    except OSError:
        return None
    if len(raw) != _CELLS_AT or not raw.startswith(_MAGIC):
        return None
    state, now = _STATE.unpack_from(raw, _STATE_AT), time.monotonic()
    counted = time_breakdown.read_counters(raw, _PACE_AT, now)
    return Glance(_HEAD.unpack_from(raw)[1], _last_change(raw), state[1], bool(state[4]), counted)


def _last_change(raw: bytes) -> float:
    """Return when anything in a record has changed last."""
    places = [_STATE_AT, *(_WAITS_AT + slot * _WAIT.size for slot in range(_WAITS))]
    places += [_CALLS_AT + index * _CALL.size for index in range(_CALLS)]
    return max(_WHEN.unpack_from(raw, place)[0] for place in places)


def read_all(folder: Path) -> dict[int, RankRecord]:
    """Return the records of all ranks of a folder, by rank."""
    found = {}
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if not path.name.isdecimal():
                continue
            record = read(path)
            if record is not None:
                found[record.rank] = record
    return dict(sorted(found.items()))
