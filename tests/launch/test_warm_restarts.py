"""Ranks that are started again as forks are what they would be as new processes, and end with whoever stands for them."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from support.matrix import sampled

from smp_config.errors import ConfigError
from smp_launch.anywhere.detect_launcher import DetectedLauncher, LauncherKind
from smp_launch.anywhere.plain_rank import SURROUNDINGS_VARIABLE, to_text
from smp_launch.ranks import messages
from smp_launch.ranks.imports import list_installed
from smp_launch.warm.conditions import other_condition, other_variable, read_conditions
from smp_launch.warm.standby import WARM_VARIABLE, keep_standby

#: No process of these tests takes longer, unless it hangs.
PATIENCE = 30.0

#: Runs two steps, so that the first start reports; then it tells what it is, and does what it is asked to.
SCRIPT = """
import os, json, signal, sys, threading, time, random
import helper
from smp_records.rank_record import current_record

current_record().begin_step()
current_record().begin_step()
parent = open(f"/proc/{os.getppid()}/cmdline").read()
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "cwd": os.getcwd(), "environ": dict(os.environ),
    "main": sys.modules["__main__"].__dict__["helper"] is helper, "name": __name__, "file": __file__,
    "threads": threading.active_count(), "is_main": threading.current_thread() is threading.main_thread(),
    "handlers": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
    "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "limits": open("/proc/self/limits").read(), "files": sorted(map(int, os.listdir("/proc/self/fd")))[:3],
    "leads_group": os.getpgrp() == os.getpid(), "streams": [str(s.encoding) + s.errors for s in (sys.stdout, sys.stderr)],
    "forked": "warm.fork_server" in parent,
}), flush=True)
print("to stderr", file=sys.stderr)
pid, draw = os.getpid(), random.random()
print(json.dumps({"pid": pid, "draw": draw, "stdin": sys.stdin.read() if "read" in sys.argv else ""}), flush=True)
what = os.environ.get("SMP_TEST_END", "0")
if what == "wait":
    signal.signal(signal.SIGUSR1, lambda *a: (print("got SIGUSR1", flush=True), sys.exit(7)))
    print("waits", flush=True)
    while True:
        time.sleep(0.05)
elif what == "raise":
    raise ValueError("of the script")
elif what.startswith("-"):
    os.kill(os.getpid(), -int(what))
sys.exit(int(what))
"""


PACKAGES = Path(__file__).resolve().parents[2] / "container"


def _with_path():
    return {**os.environ, "PYTHONPATH": str(PACKAGES)}


class Host:
    """A standby, and the ranks that it makes."""

    def __init__(self, folder, ready, environ):
        self.folder, self.ready, self.environ = folder, ready, environ

    def start(self, *words, again=True, **options):
        program = [
            sys.executable,
            "-m",
            "smp_launch.anywhere.plain_rank",
            "0",
            "--",
            str(self.folder / "train.py"),
            *words,
        ]
        program = self.ready.program(program, is_restart=again, whose="process")
        environ = {**self.environ, **self.ready.variables(), **options.pop("environ", {})}
        return subprocess.Popen(
            program, env=environ, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
        )

    def run(self, *words, **options):
        """The two lines that a rank tells, its exit code, and what it has written to stderr."""
        process = self.start(*words, **options)
        told, errors = process.communicate(options.get("input"), timeout=PATIENCE)
        lines = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
        return lines, process.returncode, errors


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("")
    return tmp_path


@pytest.fixture
def host(folder):
    """Starts a host's standby whose first rank has reported: ``host(environ)``."""
    with contextlib.ExitStack() as stack:

        def make(begin=True, **environ):
            surroundings = DetectedLauncher(LauncherKind.MACHINE, "here", 1, 0, 2, address="127.0.0.1", port=1)
            values = {
                **_with_path(),
                SURROUNDINGS_VARIABLE: to_text(surroundings),
                **environ,
            }
            ready = stack.enter_context(keep_standby(values, "train.py", folder, wanted=True))
            made = Host(folder, ready, values)
            if begin:
                lines, code, errors = made.run(again=False)
                assert code == int(environ.get("SMP_TEST_END", "0")), errors
                assert not lines[0]["forked"]
            return made

        yield make


def test_a_fork_is_what_a_new_process_would_be(host):
    made = host()
    cold, _, _ = made.run("--epochs", "3", again=False)
    warm, code, errors = made.run("--epochs", "3")
    assert code == 0
    assert warm[0].pop("forked")
    assert not cold[0].pop("forked")
    assert (
        cold[0]["leads_group"] != warm[0]["leads_group"]
    )  # mpirun's ranks lead one of their own; those of this test do not
    del cold[0]["leads_group"], warm[0]["leads_group"]
    assert warm[0] == cold[0]
    assert "to stderr" in errors
    assert "anew" not in errors


def test_forks_draw_numbers_of_their_own(host):
    made = host()
    one, other = (made.run()[0][1] for _ in range(2))
    assert one["pid"] != other["pid"]
    assert one["draw"] != other["draw"]


def test_a_fork_reads_its_standard_input(host):
    process = host().start("read", stdin=subprocess.PIPE)
    told, _ = process.communicate("from outside", timeout=PATIENCE)
    assert json.loads(told.splitlines()[1])["stdin"] == "from outside"


@pytest.mark.parametrize("end", sampled(["3", "-9", "-15", "-11"], {"3", "-9"}))
def test_the_end_of_a_fork_is_that_of_its_wrapper(host, end):
    made = host(begin=False, SMP_TEST_END=end)
    assert made.run(again=False)[1] == int(end)
    lines, code, _ = made.run()
    assert lines[0]["forked"]
    assert code == int(end)


def test_an_error_of_the_script_is_told_as_ever(host):
    made = host(begin=False, SMP_TEST_END="raise")
    _, code, cold = made.run(again=False)
    lines, again, warm = made.run()
    assert lines[0]["forked"]
    assert code == again == 1
    without_times = [[line for line in text.splitlines() if not line.startswith("smp-")] for text in (cold, warm)]
    assert without_times[0] == without_times[1]
    assert "ValueError: of the script" in warm


def test_signals_go_to_the_fork(host):
    made = host(begin=False, SMP_TEST_END="wait")
    first = made.start(again=False)
    _until(first, "waits")
    first.kill()
    process = made.start()
    lines = _until(process, "waits")
    assert json.loads(lines[0])["forked"]
    process.send_signal(signal.SIGUSR1)
    assert process.wait(PATIENCE) == 7


def _until(process, text):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text} did not come: {lines} {process.stderr.read()}")


@pytest.mark.parametrize("dies", ["wrapper", "standby"])
def test_a_fork_does_not_outlive_whoever_stands_for_it(host, dies):
    made = host(begin=False, SMP_TEST_END="wait")
    first = made.start(again=False)
    _until(first, "waits")
    first.kill()
    process = made.start()
    pid = json.loads(_until(process, "waits")[1])["pid"]
    ended = os.pidfd_open(pid)
    if dies == "wrapper":
        process.kill()
    else:
        os.kill(made.ready.pids[0], signal.SIGKILL)
    assert select.select([ended], [], [], PATIENCE)[0], "the fork lives on"
    os.close(ended)
    assert process.wait(PATIENCE) == -signal.SIGKILL


@pytest.mark.parametrize("other", sampled(["environ", "umask", "nice", "limit"], {"environ", "limit"}))
def test_a_wrapper_that_is_not_like_the_first_rank_makes_its_own_imports(host, other):
    changes = {
        "umask": lambda: os.umask(0o077),
        "nice": lambda: os.nice(1),
        "limit": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)),
    }
    options = {"environ": {"OMP_NUM_THREADS": "7"}} if other == "environ" else {"preexec_fn": changes[other]}
    lines, code, errors = host().run(**options)
    assert code == 0
    assert not lines[0]["forked"]
    assert "ranks make their imports anew: " in errors


def test_a_script_that_changes_its_environment_makes_its_own_imports(host, folder):
    (folder / "train.py").write_text(f"import os; os.environ['HF_HUB_OFFLINE'] = '1'\n{SCRIPT}")
    told, code, errors = host().run()
    assert code == 0
    assert not told[0]["forked"]
    assert "sets the variable HF_HUB_OFFLINE, which imports may read" in errors


def test_ranks_that_died_before_their_second_step_say_nothing(host):
    told, code, errors = host(begin=False).run()
    assert code == 0
    assert not told[0]["forked"]
    assert "anew" not in errors


def test_a_standby_that_has_died_is_done_without(host):
    made = host()
    os.kill(made.ready.pids[0], signal.SIGKILL)
    os.waitid(os.P_PID, made.ready.pids[0], os.WEXITED | os.WNOWAIT)
    told, code, errors = made.run()
    assert code == 0
    assert not told[0]["forked"]
    assert "nobody has its imports (Connection refused)" in errors


#: Where ``driver(code)`` has the process hold a CUDA driver whose calls return ``code``.
DRIVER = (
    "import ctypes; from types import SimpleNamespace as N; from smp_launch.ranks import imports; "
    "driver = lambda code: (setattr(imports, '_mapped_files', lambda: ['/usr/lib/libcuda.so.1']), "
    "setattr(ctypes, 'CDLL', lambda name: N(cuDeviceGetCount=lambda count: code)))"
)


@pytest.mark.parametrize(
    ("imported", "why"),
    [
        ("pass", None),
        (
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "started 1 thread(s)",
        ),
        ("import socket; kept = socket.socket()", "has opened socket"),
        ("kept = open('/dev/zero')", "has opened /dev/zero"),
        ("import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)", "handles signals"),
        ("import types; sys.modules['mpi4py.MPI'] = types.ModuleType('MPI')", "has joined MPI"),
        (f"{DRIVER}; driver(0)", "has initialized the CUDA driver"),
        (f"{DRIVER}; driver(3)", None),
    ],
)
def test_what_forks_must_not_share(imported, why):
    code = f"import sys; from smp_launch.ranks.imports import Shared; before = Shared.now()\n{imported}\nprint(before.unfit())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_with_path())
    assert (why or "None") in found.stdout


def test_only_what_is_installed_is_imported_ahead(tmp_path):
    def module(name, origin):
        made = types.ModuleType(name)
        made.__spec__ = ModuleSpec(name, None, origin=origin)
        made.__spec__.has_location = origin not in ("built-in", None)
        return name, made

    modules = dict(
        [
            module("json", json.__file__),
            module("numpy.random", pytest.__file__),
            module("sys", "built-in"),
            module("helper", str(tmp_path / "helper.py")),
            module("mpi4py.MPI", pytest.__file__),
            module("namespace", None),
            ("made", types.ModuleType("made")),
        ]
    )
    modules["alias"] = modules["json"]
    assert list_installed(modules, [str(tmp_path)]) == ["json", "numpy.random", "sys"]
    # A user's folder that holds the environment does not make its packages the user's; a folder within it does.
    assert "json" in list_installed(modules, ["/", str(Path(json.__file__).parents[3])])
    assert "json" not in list_installed(modules, [os.path.dirname(os.path.realpath(json.__file__))])


def test_variables_that_imports_cannot_have_read():
    mine = {"SMP_RESTART_COUNT": "0", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", "OMP_NUM_THREADS": "1"}
    assert other_variable(mine, {"OMP_NUM_THREADS": "1", "MASTER_PORT": "3"}) is None
    assert other_variable(mine, {**mine, "OMP_NUM_THREADS": "2"}) == "OMP_NUM_THREADS"
    assert other_variable(mine, {**mine, "SMP_EMULATE_CUDA": "1"}) == "SMP_EMULATE_CUDA"
    assert other_variable({}, {"TORCH_LOGS": "all"}) == "TORCH_LOGS"


def test_conditions_of_two_processes():
    mine = read_conditions()
    assert other_condition(mine, read_conditions()) is None
    assert other_condition(mine, {**mine, "Umask": "0777"}) == "Umask"
    assert {"Umask", "SigBlk", "limits", "mnt", "interpreter", "priority"} <= mine.keys()


def test_messages_with_descriptors():
    one, other = socket.socketpair()
    read, write = os.pipe()
    content = {"text": "é\udcff", "long": "x" * 300_000}
    sender = threading.Thread(target=messages.send, args=(one, content, (write,)))
    sender.start()
    found, descriptors = messages.receive(other)
    sender.join()
    os.write(descriptors[0], b"through")
    assert (found, os.read(read, 10)) == (content, b"through")
    assert messages.is_own_user(one)
    one.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ValueError, match="4,294,967,295 bytes"):
        messages.receive(other)
    one.sendall(b"\x10\x00\x00\x00half")
    one.close()
    with pytest.raises(EOFError):
        messages.receive(other)
    for descriptor in (read, write, *descriptors):
        os.close(descriptor)


@pytest.mark.parametrize(
    ("value", "script", "wanted"), [("0", "train.py", True), ("1", "train.sh", True), ("", "train.py", False)]
)
def test_where_nothing_is_kept_ready(tmp_path, value, script, wanted):
    with keep_standby({**os.environ, WARM_VARIABLE: value}, script, tmp_path, wanted=wanted) as ready:
        program = [sys.executable, "-m", "smp_launch.ranks.rank", "--", script]
        assert (ready.pids, ready.variables()) == ((), {})
        assert ready.program(program, is_restart=True, whose="group") == program


def test_a_value_that_says_neither():
    with (
        pytest.raises(ConfigError, match=r"SMP_WARM_RESTARTS is 'yes'.*set 0, or 1"),
        keep_standby({WARM_VARIABLE: "yes"}, "train.py", ".", wanted=True),
    ):
        pass
