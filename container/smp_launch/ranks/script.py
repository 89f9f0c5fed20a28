"""The script of a rank, run to its end in this process.

The forwarded signal becomes SIGTERM. Before the process ends, the launcher receives in one line why the script failed.
The end of the process makes mpirun, or its replacement, end all others.
"""

from __future__ import annotations

import builtins
import io
import itertools
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from smp_launch.failures import fatal_errors
from smp_launch.failures.early_ends import is_of_debugger
from smp_launch.machine.output import STARTED_PREFIX
from smp_launch.machine.processes import adopt_orphans
from smp_launch.machine.rank_pipes import take_pipes
from smp_launch.ranks.imports import REPORTED_STEP, SOCKET_VARIABLE, report
from smp_launch.ranks.script_words import forgive_parameters
from smp_records import rank_record
from smp_records.records import text_of


@dataclass
class RankPlace:
    """The identity of this rank, if it is already known when something fails."""

    rank: int = 0
    host: str = ""
    is_alone: bool = False  # without other ranks: its failure ends by the interpreter's own exit
    is_supervised: bool = True  # a launcher of this package reads its lines, and forwards a stop as SIGUSR2
    pipes: Path | None = None  # the folder of pipes to the launcher that this process has not opened yet
    has_input: bool = True  # its standard input ends at some time, which that of mpirun does not always


@dataclass(frozen=True)
class Program:
    """A script, the words behind it, and the folder of the files that it may import beside its own."""

    script: Path
    words: Sequence[str]
    folder: Path

    @property
    def folders(self) -> list[str]:
        """Return the folders in which Python looks for the user's own files."""
        return list(dict.fromkeys([str(self.script.parent), str(self.folder)]))

    def lead_imports(self) -> None:
        """Make this process import as ``python script words…`` would."""
        sys.argv = [str(self.script), *self.words]
        sys.path[:0] = self.folders  # nothing stands there for the wrapper: see smp_launch.isolated


@dataclass(frozen=True)
class Wrapper:
    """The module around the script, and its arguments, by which a process that makes its imports ahead knows it."""

    module: str
    arguments: Sequence[str]


def run_to_end(place: RankPlace, enter: Callable[[], Program], wrapper: Wrapper) -> int:
    """Run a rank's script.

    Args:
        wrapper: the module that calls this.
        enter: makes this process the rank, fills ``place`` and returns its program. Its exceptions are the rank's failure.

    Returns:
        The exit code. If a rank that is not alone fails, it ends the process instead.
    """
    program: Program | None = None
    failed: BaseException  # kept to the end: what its frames hold may take its time, or hang, when it is released
    environ, standby = dict(os.environ), os.environ.pop(SOCKET_VARIABLE, "")
    try:
        program = enter()
        _settle(place)
        if program.script.suffix == ".sh":
            _run_shell(place, program)
        else:
            _begin(place, program)
            if standby and place.rank == 0:
                _report_later(standby, wrapper, environ, program)
            _run_python(program)
    except BaseException as error:  # SystemExit too: how the script has ended is decided below
        failed = error
    else:
        return 0
    code = _end_failed(place, failed, program.folders if program else ())
    if code and not place.is_alone:
        fatal_errors.abort(code, failed)
    return code


def _end_failed(place: RankPlace, error: BaseException, folders: Iterable[str]) -> int:
    """Report why the script has ended, and return the exit code, which is 0 if it has ended well."""
    code: object = 1
    if isinstance(error, SystemExit) and not is_of_debugger(error):
        code = error.code
        if code is None or code == 0:
            return 0
        if not isinstance(code, int):
            print(text_of(error), file=sys.stderr)
        _tell(place, error)
    elif isinstance(error, _ShellError):
        code = error.code
        _tell(place, error, "ScriptError")
    else:
        _strip_own_frames(error)
        fatal_errors.explain(error, folders)
        # Before the script's hook sees it, which may abort the job.
        _tell(place, error)
        fatal_errors.show(error, place.rank, marked=place.is_supervised and not place.is_alone)
    return code if isinstance(code, int) and 0 < code < 256 else 1


def _settle(place: RankPlace) -> None:
    """Write to the launcher directly, and give signals the meaning that they have in a program of its own."""
    if place.pipes is not None:
        take_pipes(place.pipes, place.rank)
    if not place.has_input:
        # Not only closed: the next file that the script opens would become its input.
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        if signal.getsignal(number) is signal.SIG_IGN:  # by the shell that has started the job
            signal.signal(number, signal.SIG_DFL)


def _begin(place: RankPlace, program: Program) -> None:
    """Let the launcher watch and stop this process, and make its output that of a rank."""
    rank_record.begin(os.environ, place.rank)
    if place.is_supervised:
        _translate_stop_signal()
        _announce(place.rank)
    whole_lines()
    forgive_parameters(program.words)


def _tell(place: RankPlace, error: BaseException, name: str | None = None) -> None:
    if place.is_supervised:
        fatal_errors.tell(place.rank, place.host, error, name)


def _translate_stop_signal() -> None:
    """Turn SIGUSR2, which mpirun forwards, into SIGTERM for the main thread.

    A thread waits for it, because a Python handler would not run while the main thread is inside native code (a
    receive that never ends). SIGTERM goes to the main thread, because only its own signal wakes it from a system call.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    main_thread = threading.main_thread().ident or 0

    def translate() -> None:
        while True:
            signal.sigwait({signal.SIGUSR2})
            signal.pthread_kill(main_thread, signal.SIGTERM)

    # A daemon, since it waits for a signal that may never come.
    threading.Thread(target=translate, daemon=True, name="stop-signal").start()


def _announce(rank: int) -> None:
    """Report to the launcher that this process can take signals, and which process to watch."""
    os.write(2, f"{STARTED_PREFIX}{rank} {os.getpid()}\n".encode())


class _Descriptor(io.RawIOBase):
    """Writes to a descriptor, always all of it.

    Not ``io.BufferedWriter``: it would raise if a signal handler prints while the script prints. If a script cannot
    report that it saves, it may not save.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        while left:
            left = left[os.write(self._descriptor, left) :]
        return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


def _report_later(path: str, wrapper: Wrapper, environ: Mapping[str, str], program: Program) -> None:
    """Report this rank's imports after its first steps, so that the next start need not import them again."""
    notes, begun = rank_record.current_record(), itertools.count(1)

    def report_once() -> None:
        if next(begun) == REPORTED_STEP:
            notes.on_step = None
            report(path, wrapper.arguments, wrapper.module, environ, program.folders)

    notes.on_step = report_once


def whole_lines() -> None:
    """Write each line at once when it ends, so that ranks cannot meet inside a line; never later than its end."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        try:
            before.flush()
        except (OSError, ValueError, AttributeError):
            continue  # closed by the parent: keep what there is
        errors = "backslashreplace" if name == "stderr" else before.errors
        stream = io.TextIOWrapper(
            cast("IO[bytes]", _Descriptor(descriptor)), encoding=before.encoding, errors=errors, line_buffering=True
        )
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run_python(program: Program) -> None:
    """Run the script as ``python script words…`` would, in this process."""
    script = program.script
    program.lead_imports()
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=str(script), __builtins__=builtins, __cached__=None, __loader__=None, __spec__=None)
    code = compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    # It stays there after the script: its pickled objects and its exit handlers must find their own __main__.
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _run_shell(place: RankPlace, program: Program) -> None:
    """Run the script with bash; a stop reaches bash and everything it started, and all may finish.

    mpirun forwards SIGUSR2 to the whole process group, and it would end whatever does not expect it. So bash and its
    children begin with SIGUSR2 ignored. Blocked would be worse: it would stay pending, and a program that wants the
    signal and sets a handler would never get it.

    A bash without a trap for SIGTERM dies at once; the programs that it ran may still save, and how they end is how
    the script ended.
    """
    if not place.is_supervised:  # the parent signals this process, and sees how it ends
        os.execvp("bash", ["bash", str(program.script), *program.words])
    adopt_orphans()
    stopping = False

    def pass_on(number: int, frame: object) -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            os.killpg(os.getpgrp(), signal.SIGTERM)

    # A handler, not SIG_IGN: an ignored signal would stay ignored in bash and in all that it starts.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.signal(signal.SIGUSR2, pass_on)
    process = subprocess.Popen(["bash", str(program.script), *program.words], preexec_fn=_ignore_stop_signal)
    _announce(place.rank)  # not before bash exists, to which a stop is passed on
    code = process.wait()
    if stopping and code == -signal.SIGTERM and set(_rest()) - {code} == {0}:
        return
    if code:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise _ShellError(f"{program.script.name} {how}; its last words are in the log", abs(code))


def _rest() -> Iterator[int]:
    """Yield the exit codes of all processes that bash left behind, as they end."""
    while True:
        try:
            yield os.waitstatus_to_exitcode(os.wait()[1])
        except ChildProcessError:
            return  # none is left


def _ignore_stop_signal() -> None:
    # It would end bash. This process turns it into SIGTERM for the whole group; unlike a handler, this outlasts exec.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


class _ShellError(RuntimeError):
    """A shell script that did not end well."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def _strip_own_frames(error: BaseException) -> None:
    """Let the traceback begin with the script, if the script has frames."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename != __file__:
            break
        trace = trace.tb_next
    # A syntax error names the script's line itself; the frames of compile() would only hide it.
    if trace is not None or isinstance(error, SyntaxError):
        error.__traceback__ = trace
