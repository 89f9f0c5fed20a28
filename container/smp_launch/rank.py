"""The wrapper around the user's script in every rank: ``python -m smp_launch.rank -- train.py --epochs 3``.

It gives the rank its host's environment, turns the forwarded signal into SIGTERM, and tells the launcher in one
line why the script failed before it ends the process, which makes mpirun end all others.
"""

from __future__ import annotations

import builtins
import io
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from smp_config import emulation
from smp_launch import ending
from smp_launch.environment import HOST_VARIABLE, TrainingEnvironment, cpu_count, emulates_cuda
from smp_launch.hosts import LAYOUT_VARIABLE, Kind, Layout
from smp_launch.network import network_defaults, usable_interface
from smp_launch.output import STARTED_PREFIX
from smp_launch.processes import adopt_orphans
from smp_launch.script_words import forgive_parameters
from smp_launch.tree import BASE_VARIABLE, Tree

#: Where the launchers that we know say which rank this is.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")

_LOCALHOST = "127.0.0.1"

#: Holds the entry point by which PyTorch registers the backend ``smddp`` when it is imported.
_DISCOVERY = Path(__file__).parent / "discovery"

#: The same for the emulation of CUDA.
_EMULATION = Path(__file__).parent / "discovery_emulation"

#: The same for what other libraries need in a job of the model parallel library.
_LIBRARIES = Path(__file__).parent / "discovery_libraries"


def main(arguments: Sequence[str]) -> int:
    """Run the script of this rank.

    Args:
        arguments: ``["--", script, *words]``.

    Returns:
        The exit code; where mpirun runs the ranks, a failing script ends the process instead.
    """
    words = list(arguments)
    if words[:1] == ["--"]:
        words = words[1:]
    rank, host, alone = 0, "", False
    failed: BaseException  # kept to the end: what its frames hold may take its time, or hang, when it is released
    try:
        layout = Layout.from_environment(os.environ)
        alone = layout.kind is Kind.SCRIPT
        rank = _rank_of(layout, os.environ)
        host = layout.host_of(rank)
        tree = _prepare(layout, rank, os.environ)
        script = tree.code_dir / words[0]
        words = [tree.place(word) for word in words[1:]]
        os.chdir(tree.code_dir)
        if script.suffix == ".sh":
            _run_shell(rank, script, words)
        else:
            _translate_stop_signal()
            _announce(rank)
            _whole_lines()
            forgive_parameters(words)
            _run_python(script, words, tree.code_dir)
    except SystemExit as error:
        if error.code in (None, 0):
            return 0
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        failed, code = error, error.code if isinstance(error.code, int) else 1
        ending.tell(rank, host, error)
    except _ShellError as error:
        failed, code = error, error.code
        ending.tell(rank, host, error, "ScriptError")
    except BaseException as error:
        failed, code = error, 1
        _strip_own_frames(error)
        ending.explain(error)
        # Before the script's hook sees it, which may abort the job.
        ending.tell(rank, host, error)
        ending.show(error, rank)
    else:
        return 0
    code = code if 0 < code < 256 else 1
    if not alone:
        ending.abort(code, failed)
    return code


def rank_variables(layout: Layout, rank: int, interface: str, cores: int) -> dict[str, str]:
    """Where this rank stands; for the runtime, for libraries, and for scripts that read the environment.

    ``LOCAL_RANK`` is only for the data parallel library: with model parallelism it would make the Transformers
    ``Trainer`` start a second, contradicting way of distributing.
    """
    local = str(layout.local_rank_of(rank))
    values = {
        "SMP_RANK": str(rank),
        "SMP_WORLD_SIZE": str(layout.world_size),
        "SMP_LOCAL_RANK": local,
        "SMP_LOCAL_SIZE": str(layout.processes_per_host),
        "SMP_HOST": layout.host_of(rank),
        "OMP_NUM_THREADS": str(layout.threads_per_rank(cores)),
        "MASTER_ADDR": _LOCALHOST if layout.one_machine else layout.leader,
        "GLOO_SOCKET_IFNAME": interface,
    }
    if layout.kind is not Kind.SCRIPT:
        # Open MPI counts per machine; simulated hosts share one.
        values |= {"OMPI_COMM_WORLD_LOCAL_RANK": local, "OMPI_COMM_WORLD_LOCAL_SIZE": str(layout.processes_per_host)}
    if layout.kind is Kind.DATA_PARALLEL:
        values |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(layout.world_size),
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": str(layout.processes_per_host),
            "SMDATAPARALLEL_LOCAL_RANK": local,
        }
    return values


#: What the user's own value overrides.
_USER_MAY_SET = frozenset({"OMP_NUM_THREADS", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"})


def _prepare(layout: Layout, rank: int, environ: MutableMapping[str, str]) -> Tree:
    """Make ``environ`` the environment of this rank on its host; gives the host's tree."""
    host = layout.host_of(rank)
    here = environ.get(HOST_VARIABLE) or layout.leader
    tree = Tree.from_environment(environ)
    if layout.simulated:
        tree = tree.of_host(host, here)
    elif here != host:
        raise RuntimeError(
            f"rank {rank} runs on host {here!r}, but belongs to {host!r}: with {layout.processes_per_host} process(es) per host "
            "the ranks are laid over the hosts in blocks, and mpirun was told otherwise; remove options such as --map-by "
            "and --rank-by from custom_mpi_options"
        )
    training = TrainingEnvironment.read(tree, environ, host)
    interface = usable_interface(training.network_interface, layout.one_machine)
    wanted = rank_variables(layout, rank, interface, cpu_count())
    for name in _USER_MAY_SET & environ.keys():
        wanted.pop(name)
    if layout.kind is Kind.MODEL_PARALLEL:
        environ.pop("LOCAL_RANK", None)
    environ.pop(LAYOUT_VARIABLE, None)
    hosts = 1 if layout.one_machine else len(layout.hosts)
    for name, value in network_defaults(training.instance_type, interface, hosts).items():
        environ.setdefault(name, value)
    environ.update(training.variables())
    environ.update(wanted)
    environ[HOST_VARIABLE] = host
    environ[BASE_VARIABLE] = str(tree.base)
    environ["SMP_CHECKPOINT_DIR"] = str(tree.base / "checkpoints")
    discovered = [_DISCOVERY] if layout.kind is Kind.DATA_PARALLEL else []
    if emulates_cuda(environ):
        discovered.append(_EMULATION)
    elif emulation.is_asked_for(environ):
        environ[emulation.VARIABLE] = "0"
    # In the path, so that the script's own processes find them, too.
    folders = [str(tree.code_dir), environ.get("PYTHONPATH", ""), *map(str, discovered)]
    sys.path += map(str, discovered)
    if layout.kind is Kind.MODEL_PARALLEL:
        sys.path.append(str(_LIBRARIES))  # of this process only: one that the script starts is no rank
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    return tree


def _rank_of(layout: Layout, environ: MutableMapping[str, str]) -> int:
    if layout.kind is Kind.SCRIPT:
        return 0
    for name in _RANK_VARIABLES:
        if name in environ:
            return int(environ[name])
    raise RuntimeError(
        f"this process does not know its rank: none of {', '.join(_RANK_VARIABLES)} is set, as mpirun of Open MPI does for "
        "every process it starts; start the job with 'python -m smp_launch train'"
    )


def _translate_stop_signal() -> None:
    """From now on SIGUSR2, which mpirun forwards, is SIGTERM for the main thread.

    A thread waits for it, because a Python handler would not run while the main thread is inside native code (a
    receive that never ends). To the main thread, because only a signal of its own wakes it from a system call.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    main_thread = threading.main_thread().ident or 0

    def translate() -> None:
        while True:
            signal.sigwait({signal.SIGUSR2})
            signal.pthread_kill(main_thread, signal.SIGTERM)

    threading.Thread(target=translate, daemon=True, name="stop-signal").start()


def _announce(rank: int) -> None:
    """Tell the launcher that signals may come, and which process to watch."""
    os.write(2, f"{STARTED_PREFIX}{rank} {os.getpid()}\n".encode())


class _Descriptor(io.RawIOBase):
    """Writes to a descriptor, always all of it.

    Not ``io.BufferedWriter``: a signal handler that prints while the script prints would make it raise, and a script
    that cannot say that it saves may not save.
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


def _whole_lines() -> None:
    """Write each line at once when it ends, so that ranks cannot meet inside a line; never later than its end."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        try:
            before.flush()
        except (OSError, ValueError, AttributeError):
            continue  # closed by whoever started us: keep what there is
        errors = "backslashreplace" if name == "stderr" else before.errors
        stream = io.TextIOWrapper(
            cast("IO[bytes]", _Descriptor(descriptor)), encoding=before.encoding, errors=errors, line_buffering=True
        )
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run_python(script: Path, words: list[str], code_dir: Path) -> None:
    """Run the script as ``python script words…`` would, in this process."""
    sys.argv = [str(script), *words]
    folders = list(dict.fromkeys([str(script.parent), str(code_dir)]))
    if getattr(sys.flags, "safe_path", False):
        sys.path[:0] = folders
    else:
        sys.path[:1] = folders  # the first entry is where `-m` looked
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=str(script), __builtins__=builtins, __cached__=None, __loader__=None, __spec__=None)
    code = compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    # It stays there: what the script pickles or registers to run at exit must find its own __main__.
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _run_shell(rank: int, script: Path, words: list[str]) -> None:
    """Run the script with bash; a stop reaches bash and everything it started, and all may finish.

    mpirun forwards SIGUSR2 to the whole process group, and it would end whatever does not expect it. So bash and its
    children begin with SIGUSR2 ignored. Blocked would be worse: it would stay pending, and a program that wants the
    signal and sets a handler would never get it.

    A bash without a trap for SIGTERM dies at once; the programs that it ran may still save, and how they end is how
    the script ended.
    """
    adopt_orphans()
    stopping = False

    def pass_on(number: int, frame: object) -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            os.killpg(os.getpgrp(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.signal(signal.SIGUSR2, pass_on)
    process = subprocess.Popen(["bash", str(script), *words], preexec_fn=_ignore_stop_signal)
    _announce(rank)  # now that there is somebody to pass a stop on to
    code = process.wait()
    if stopping and code == -signal.SIGTERM and set(_rest()) - {code} == {0}:
        return
    if code:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise _ShellError(f"{script.name} {how}; its last words are in the log", abs(code))


def _rest() -> Iterator[int]:
    """The exit codes of all processes that bash left behind, as they end."""
    while True:
        try:
            yield os.waitstatus_to_exitcode(os.wait()[1])
        except ChildProcessError:
            return


def _ignore_stop_signal() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


class _ShellError(RuntimeError):
    """A shell script that did not end well."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def _strip_own_frames(error: BaseException) -> None:
    """Begin the traceback with the script, where there is one."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    if trace is not None or isinstance(error, SyntaxError):
        error.__traceback__ = trace


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
