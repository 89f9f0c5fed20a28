"""The log of a job: written by the threads that read its hosts, followed by any number of readers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from smp_config.records import ProgressRecord, UsageRecord, parse_progress, parse_usage

#: A progress bar that redraws its line is let through at most this often, in seconds.
_REDRAW_SECONDS = 1.0

#: Longest time without an item for who follows the log, so that a clock can be redrawn.
_TICK_SECONDS = 0.25


class JobLog:
    """Lines in a file, and beside them the newest progress record and what the ranks that have ended used.

    Their lines are taken out of the text: a reader gets them as records, and the file stays readable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.progress: ProgressRecord | None = None
        self.usage: list[UsageRecord] = []
        self._file = path.open("ab")
        self._changed = threading.Condition()
        self._closed = False

    def write(self, line: str, source: str = "") -> None:
        """Append one line (without its line break); ``source`` names the host when it is not the leader."""
        record, usage = parse_progress(line), parse_usage(line)
        with self._changed:
            if self._closed:
                return
            if record is not None:
                self.progress = record
            elif usage is not None:
                self.usage.append(usage)
            else:
                text = f"[{source}] {line}\n" if source else line + "\n"
                self._file.write(text.encode("utf-8", "replace"))
                self._file.flush()
            self._changed.notify_all()

    def close(self) -> None:
        """No more lines: followers end after the last one."""
        with self._changed:
            self._closed = True
            self._file.close()
            self._changed.notify_all()

    def follow(self, *, wait: bool = True) -> Iterator[str | ProgressRecord | UsageRecord | None]:
        """Every line from the first, and each new record, until the log is closed; None when nothing is new.

        Args:
            wait: False ends at what is there now.
        """
        shown: ProgressRecord | None = None
        with self.path.open("rb") as reader:
            while True:
                with self._changed:
                    closed, newest = self._closed, self.progress
                    if wait and not closed and newest is shown and not self._grown(reader.tell()):
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
                if closed or not wait:
                    yield from list(self.usage)
                    return

    def tail(self, lines: int) -> list[str]:
        """The last lines of the text."""
        try:
            return self.path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
        except OSError:
            return []

    def _grown(self, position: int) -> bool:
        return os.path.getsize(self.path) > position


class LineSplitter:
    """Bytes of a pipe, in any pieces, to lines; a line that a carriage return redraws counts once a second."""

    def __init__(self) -> None:
        self._rest = b""
        self._redrawn = 0.0

    def feed(self, data: bytes) -> Iterator[str]:
        """The lines that ``data`` completes."""
        self._rest += data
        while True:
            ends = [at for at in (self._rest.find(b"\n"), self._rest.find(b"\r")) if at >= 0]
            if not ends:
                return
            end = min(ends)
            line, terminator = self._rest[:end], self._rest[end : end + 1]
            if terminator == b"\r":
                if end + 1 == len(self._rest):
                    return  # what follows decides: "\r\n" is a plain line end
                if self._rest[end + 1 : end + 2] == b"\n":
                    terminator, end = b"\n", end + 1
            self._rest = self._rest[end + 1 :]
            text = line.decode("utf-8", "replace")
            if terminator == b"\n":
                yield text
            elif text.strip() and time.monotonic() - self._redrawn >= _REDRAW_SECONDS:
                self._redrawn = time.monotonic()
                yield text

    def rest(self) -> Iterator[str]:
        """What the pipe ended with, when it did not end with a line break."""
        text, self._rest = self._rest.decode("utf-8", "replace").rstrip("\r"), b""
        if text:
            yield text
