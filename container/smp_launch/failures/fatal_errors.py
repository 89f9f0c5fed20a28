"""The end of a failed rank's process: it reports the reason first, then saves its remaining output in bounded time."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import gc
import hashlib
import io
import os
import re
import signal
import socket
import sys
import termios
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from smp_config.error_codes import code_of, give_code
from smp_launch.failures import known_mistakes
from smp_launch.failures.failure import REPORT_SUFFIX
from smp_launch.machine.rank_pipes import REPORT_VARIABLE
from smp_records.rank_record import current_record
from smp_records.records import FailureRecord, format_failure

#: Seconds for exit handlers and open files. Other ranks wait for this one meanwhile, and none of them may hang in it.
EXIT_SECONDS = 2.0

#: Seconds until the system ends a rank with an exit handler that holds the interpreter's lock: no Python timer runs then.
_LAST_RESORT_SECONDS = EXIT_SECONDS + 1.0

#: Seconds for mpirun to read a failing rank's last words, and then to pass them on.
_READ_PATIENCE = 1.0
_PASS_ON_SECONDS = 0.1

#: Before each line of a traceback that PyTorch's hook prints.
_MARK = re.compile(r"^\[rank\d+\]: ?")

#: Of a failing script's message, in the failure line; the log has it whole.
_MESSAGE_BYTES = 1600


def tell(rank: int, host: str, error: BaseException, name: str | None = None) -> None:
    """Report to the launcher why the rank fails.

    Args:
        name: name of an error that is no exception of the script; the report then has no traceback.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    _flush_streams()
    try:
        record = FailureRecord.of(rank, host, error, text)
        record = record.model_copy(update={"message": _cut(record.message)})
        if name is not None:
            record = record.model_copy(update={"error_type": name, "traceback": ""})
        _leave_report(record)
        # One write of less than a pipe's atomic size, so that no other line can get between.
        os.write(2, (format_failure(record) + "\n").encode())
    except Exception:  # the rank must end with the script's error, even if reporting it fails
        traceback.print_exc()


def explain(error: BaseException, folders: Iterable[str] = ()) -> None:
    """Add an explanation for beginners to an error's message, if its cause is a known mistake.

    Args:
        folders: folders of the script. Their files may have names of Python's own modules.
    """
    with contextlib.suppress(Exception):  # a class of the script's may do anything when it is asked
        _explain(error, folders)


def _explain(error: BaseException, folders: Iterable[str]) -> None:
    known = current_record().explain
    reworded = None if known is None else known(error)
    if reworded is not None:
        error.args = (str(reworded),)
        error.accused = getattr(reworded, "accused", ())  # type: ignore[attr-defined]
        if code := code_of(reworded):
            give_code(error, code)
        return
    if (told := known_mistakes.find(error, folders)) is not None:
        text = ": ".join(filter(None, [str(error), told.words]))
        error.args = (text,)
        if isinstance(error, ImportError):
            error.msg = text
        elif (
            isinstance(error, OSError) and error.filename is not None
        ):  # its text is made of these, not of the arguments
            error.strerror, error.filename, error.filename2 = text.removeprefix(f"[Errno {error.errno}] "), None, None
        give_code(error, told.code)


def show(error: BaseException, rank: int = 0, *, marked: bool = False) -> None:
    """Print the traceback as the interpreter would: through the script's hook, and itself where the hook fails.

    Of several ranks of a machine that fail with the same error, or because of it, only the first prints it, the others a line.

    Args:
        marked: put the rank before each line, as PyTorch's hook does, if the script has no hook of its own. A line of the log
            then shows whose it is, and a terminal can leave it out.
    """
    told = getattr(error, "failure", None)
    if isinstance(told, FailureRecord):  # which is in the message, and would be printed again as the cause
        error.__cause__, error.__suppress_context__ = None, True
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    record = FailureRecord.of(rank, "", error, text)
    first = _first_to_tell(record)
    # A hook of the script's may end the process, so its words are not held back.
    marked = marked and sys.excepthook is sys.__excepthook__
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said) if marked or not first else contextlib.nullcontext():
            sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as second:  # of a hook of the script's, reported as Python does
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(type(second), second, second.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(type(error), error, error.__traceback__)
        return
    if first and marked:
        lines = said.getvalue().splitlines()
        print("\n".join(f"[rank{rank}]: {line}" for line in lines), file=sys.stderr)
    if not first:
        of = f" of rank {record.rank}" if record.rank != rank else ""
        line = f"rank {rank}: the same {record.error_type}{of}"
        print("\n".join(_but_told(said.getvalue(), text, line)), file=sys.stderr)


def _but_told(said: str, text: str, instead: str) -> list[str]:
    """Return the lines of the first argument with ``instead`` in place of the traceback ``text``, if they begin with it."""
    lines, told = said.splitlines(), text.splitlines()
    # PyTorch's hook marks lines with the rank. The last line may hold a suggestion of the interpreter's.
    plain = [_MARK.sub("", line) for line in lines[: len(told) - 1]]
    return [instead, *filter(None, lines[len(told) :])] if plain == told[:-1] else lines


#: Held while this process lives, so that no other rank of this machine reports the same error.
_told: list[socket.socket] = []


def _first_to_tell(record: FailureRecord) -> bool:
    """Return whether no other process of this job on this machine has reported this error before."""
    places = [line for line in record.traceback.splitlines() if line.startswith('  File "')]
    words = f"{record.error_type} {record.message} {places[-1:]}"
    mark = hashlib.sha256(words.encode("utf-8", "replace")).hexdigest()
    claim = socket.socket(socket.AF_UNIX)
    try:
        # A name that only one process can have, and that leaves no file; ranks of one job and machine have one parent.
        claim.bind(f"\0smp-{socket.gethostname()[:24]}-{os.getppid()}-{mark[:32]}")
    except OSError as error:
        claim.close()
        return error.errno != errno.EADDRINUSE  # without such names on this system, every rank reports
    _told.append(claim)
    return True


def abort(code: int, failed: BaseException) -> NoReturn:
    """Run the exit handlers and write out open files for ``EXIT_SECONDS`` at most, and end; mpirun ends all others.

    Not by the interpreter's own exit, which waits for threads and for ``MPI_Finalize``, which waits for all ranks; nor
    through ``MPI_Abort``, which can hang while another thread of this rank is inside MPI.

    Args:
        failed: lives on to the very end, with all that its frames hold.
    """
    try:
        # First: what follows runs code of the script and of libraries, and any of it may hang.
        watchdog = threading.Timer(EXIT_SECONDS, os._exit, (code,))
        watchdog.daemon = True
        watchdog.start()
        # Should no thread get Python's lock any more, the system itself ends the process.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _LAST_RESORT_SECONDS)
        flush_files()  # first, as a handler may hang; and again, as handlers write
        atexit._run_exitfuncs()  # noqa: SLF001 - os._exit() runs none
        flush_files()
        _flush_streams()
        _wait_until_read(2)
    finally:
        # Without the interpreter's own end, which waits for threads that may never end.
        os._exit(code)


def flush_files() -> None:
    """Write out what open files hold back, as their ends would: text first, as it lies above bytes."""
    # By the type: isinstance() asks the object for its class, and runs code of stand-ins that load a module late.
    found = [o for o in gc.get_objects() if issubclass(type(o), io.IOBase)]
    # Text files first: they write into the files of bytes below them.
    for file in found:
        if issubclass(type(file), io.TextIOBase):
            _flush(file)
    for file in found:
        if issubclass(type(file), io.BufferedIOBase):
            _flush(file)


def _flush(file: io.IOBase) -> None:
    try:
        if not file.closed and file.writable():
            file.flush()
    except Exception:
        # The file is the script's or a library's, in any state; the other files must still be flushed.
        return


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # the reader is gone, or the script has closed or replaced the stream


def _cut(message: str) -> str:
    """Cut a message to at most ``_MESSAGE_BYTES``, so that the line has room for the traceback too."""
    raw = message.encode("utf-8", "replace")
    return message if len(raw) <= _MESSAGE_BYTES else raw[:_MESSAGE_BYTES].decode("utf-8", "ignore") + "…"


def _leave_report(record: FailureRecord) -> None:
    """Write the whole record to the launcher's folder too, if the launcher runs on this machine."""
    folder = os.environ.get(REPORT_VARIABLE)
    if not folder:
        return
    try:
        temporary = Path(folder, f".{record.rank}.{os.getpid()}")  # ranks that got its message write it too
        temporary.write_text(record.model_dump_json(), encoding="utf-8")
        temporary.rename(Path(folder, f"{record.rank}{REPORT_SUFFIX}"))
    except OSError:
        pass  # the launcher is gone, or the disk is full: it still has the line


def _wait_until_read(descriptor: int) -> None:
    """Wait until Open MPI 5 has passed on the output. It drops the rest if a rank ends badly."""
    unread = bytearray(4)
    deadline = time.monotonic() + _READ_PATIENCE
    while time.monotonic() < deadline:
        try:
            fcntl.ioctl(descriptor, termios.FIONREAD, unread)
        except OSError:
            break  # neither pipe nor terminal
        if not any(unread):
            break
        time.sleep(0.005)  # a pipe does not notify its writer of reads
    time.sleep(_PASS_ON_SECONDS)  # mpirun has read it, but does not report when it has passed it on
