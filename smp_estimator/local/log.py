"""The log of a job: written by the threads that read its hosts, followed by any number of readers."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from smp_config.machine.disk_space import full_disk
from smp_estimator.local.files.tree import only_for_us
from smp_records.records import ProgressRecord, UsageRecord, parse_progress, parse_usage

#: A progress bar that redraws its line is let through at most this often, in seconds.
_REDRAW_SECONDS = 1.0

#: Longest time without an item for who follows the log, so that a clock can be redrawn.
_TICK_SECONDS = 0.25


#: Bytes of the longest line; more without a line break is split.
_LONGEST_LINE = 1 << 20

#: Lines kept in memory, so that the end of a log is known even if its file cannot be written.
_REMEMBERED = 50


class JobLog:
    """Log lines in a file, the newest progress record, and the usage records of the ranks that have ended.

    Lines with records are not written to the file: readers receive them as records, and the file stays readable.

    If the log can no longer be written, it still accepts lines, because the job's processes would otherwise block
    on a full pipe. It reports the failure once, and keeps the newest lines in memory.
    """

    def __init__(self, path: Path, failed: Callable[[], None] = lambda: None) -> None:
        """Open the file.

        Args:
            failed: called once, from whichever thread writes, when a line could not be written.
        """
        self.path = path
        self.progress: ProgressRecord | None = None
        self.usage: list[UsageRecord] = []
        self._failed = failed
        self._failure: str | None = None
        self._remembered: deque[str] = deque(maxlen=_REMEMBERED)
        # Nothing is buffered: a line that cannot be written must not come up again when the file is closed.
        self._file = open(path, "ab", buffering=0, opener=only_for_us)  # noqa: SIM115 - closed by close()
        self._whole = self._file.tell()
        self._lost = 0
        # Guards all of the above.
        self._changed = threading.Condition()
        self._closed = False

    def write(self, line: str, source: str = "") -> None:
        """Append one line (without its line break); ``source`` names the host when it is not the leader."""
        self.write_all([line], source)

    def write_all(self, lines: Iterable[str], source: str = "") -> None:
        """Append lines, all at once."""
        texts = []
        progress, usage = None, []
        for line in lines:
            if (record := parse_progress(line)) is not None:
                progress = record
            elif (used := parse_usage(line)) is not None:
                usage.append(used)
            else:
                texts.append(f"[{source}] {line}" if source else line)
        with self._changed:
            if self._closed:
                return
            self.progress = progress or self.progress
            self.usage += usage
            self._remembered.extend(texts)
            failed = self._append_all([f"{text}\n".encode("utf-8", "replace") for text in texts])
            self._changed.notify_all()
        # Outside of the lock: the callback is other code, which may use the log.
        if failed:
            self._failed()

    def give_up(self, error: Exception) -> None:
        """Record that the log's writer has failed and report the failure."""
        with self._changed:
            self._failure = (
                self._failure or f"the job's log {self.path} cannot be written: {type(error).__name__}: {error}"
            )
        self._failed()

    def close(self) -> None:
        """Close the log to new lines; followers end after the last one."""
        with self._changed:
            if not self._closed:
                self._closed = True
                with contextlib.suppress(OSError):  # a network's file system may report a failed write only now
                    self._file.close()
            self._changed.notify_all()

    @property
    def failure(self) -> str | None:
        """Return why and how many lines are missing in the file, and where it ends; None if none are missing."""
        with self._changed:
            if self._failure is None:
                return None
            lines = f"{self._lost} line{'s' * (self._lost != 1)}"
            return f"{self._failure}; it holds {self._whole:,} bytes, and {lines} after them are lost"

    def _append_all(self, lines: Sequence[bytes]) -> bool:
        """Write whole lines; return whether the first unwritable line is among them."""
        if self._failure is not None:
            self._lost += len(lines)
            return False
        data = b"".join(lines)
        written = 0
        try:
            rest = memoryview(data)
            while rest:
                count = self._file.write(rest)
                written += count
                rest = rest[count:]
        except OSError as error:
            said = full_disk(error, self.path) or f"{self.path} cannot be written: {error.strerror or error}"
            self._failure = f"the job's log {said}"
            whole = data.rfind(b"\n", 0, written) + 1
            self._lost = len(lines) - data.count(b"\n", 0, whole)
            self._whole += whole
            with contextlib.suppress(OSError):  # part of a line would be read as a whole one
                self._file.truncate(self._whole)
            return True
        self._whole += len(data)
        return False

    def follow(self, *, wait: bool = True) -> Iterator[str | ProgressRecord | UsageRecord | None]:
        """Yield every line from the first, and each new record, until the log is closed; None when nothing is new.

        Args:
            wait: False ends at the last line written so far.
        """
        shown: ProgressRecord | None = None
        with self.path.open("rb") as reader:
            while True:
                with self._changed:
                    if wait and self._has_no_news(reader, shown):
                        self._changed.wait(_TICK_SECONDS)
                    closed, newest = self._closed, self.progress
                # A line is written and flushed under the lock, so whatever is read here is whole.
                for line in iter(reader.readline, b""):
                    yield line.decode("utf-8", "replace").rstrip("\n")
                if newest is not shown and newest is not None:
                    shown = newest
                    yield newest
                elif not closed:
                    yield None
                is_last = closed or not wait
                if is_last:
                    yield from list(self.usage)
                    return

    def _has_no_news(self, reader: BinaryIO, shown: ProgressRecord | None) -> bool:
        """Return whether the log is open, without a new line or record; the caller holds the lock."""
        if self._closed or self.progress is not shown:
            return False
        return not self._grown(reader)

    def tail(self, lines: int) -> list[str]:
        """Return the last lines of the text, at most 50, including lines that could not be written."""
        with self._changed:
            return list(self._remembered)[-lines:]

    @staticmethod
    def _grown(reader: BinaryIO) -> bool:
        # By its descriptor: the file may have been removed by hand.
        return os.fstat(reader.fileno()).st_size > reader.tell()


class LineSplitter:
    """A splitter of a pipe's bytes into lines; a line that is redrawn by carriage returns counts once a second."""

    def __init__(self) -> None:
        self._rest = b""
        self._redrawn = 0.0

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the lines that ``data`` completes."""
        *ended, rest = (self._rest + data).split(b"\n")
        for line in ended:
            *redrawn, text = line.removesuffix(b"\r").split(b"\r")
            yield from self._redraw(redrawn)
            yield text.decode("utf-8", "replace")
        *redrawn, rest = rest.split(b"\r")
        if redrawn and not rest:  # what follows decides: "\r\n" is a plain line end
            rest = redrawn.pop() + b"\r"
        yield from self._redraw(redrawn)
        if len(rest) >= _LONGEST_LINE:
            yield rest.decode("utf-8", "replace")
            rest = b""
        self._rest = rest

    def _redraw(self, texts: Iterable[bytes]) -> Iterator[str]:
        for text in texts:
            if text.strip() and time.monotonic() - self._redrawn >= _REDRAW_SECONDS:
                self._redrawn = time.monotonic()
                yield text.decode("utf-8", "replace")

    def rest(self) -> Iterator[str]:
        """Yield the pipe's last text if it did not end with a line break."""
        text, self._rest = self._rest.decode("utf-8", "replace").rstrip("\r"), b""
        if text:
            yield text
