"""What a job tells of its end: input that is not there, output that is kept, and errors that can hardly be told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from smp_config.machine.disk_space import full_disk, has_room, no_more_files, note_room
from smp_launch.failures import early_ends
from smp_launch.failures.failure import FailureCollector
from smp_launch.failures.fatal_errors import explain
from smp_launch.isolated import isolated_command
from smp_launch.machine import output
from smp_launch.machine.output import LineAssembler, OutputLine, WholeLines
from smp_launch.machine.rank_pipes import REPORT_VARIABLE
from smp_launch.machine.signals import StopRequests
from smp_launch.mpirun.command import as_root
from smp_launch.supervision import supervise
from smp_records.records import FailureRecord, format_failure, parse_failure

PACKAGES = str(Path(__file__).resolve().parents[2] / "container")


def raised(code, **names):
    """The error that a piece of code raises."""
    try:
        exec(code, names)
    except BaseException as error:
        return error
    raise AssertionError("it has ended well")


@pytest.mark.job
@pytest.mark.parametrize("processes", [2, None])
def test_every_rank_reads_the_end_of_its_input(launcher, processes):
    job = launcher.job("import sys\nprint('read', repr(sys.stdin.read()))\ninput()", processes=processes)
    code, log = launcher.run(job)
    assert code == 1
    assert log.count("read ''") == (processes or 1)
    assert "EOFError: EOF when reading a line: the ranks of a job have no standard input" in job.failure()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("input()", early_ends._NO_INPUT),
        ("import getpass; getpass._raw_input('', input=__import__('io').StringIO())", early_ends._NO_INPUT),
        (
            "import pdb, io; pdb.Pdb(stdin=io.StringIO(), stdout=io.StringIO()).set_trace()\nx = 1",
            early_ends._NO_DEBUGGER,
        ),
        ("try:\n input()\nexcept EOFError:\n raise RuntimeError('no answer')", early_ends._NO_INPUT),
        ("import pickle; pickle.loads(b'')", None),
        ("raise EOFError('of a file')", None),
        ("raise SystemExit(3)", None),
    ],
)
def test_want_of_input_is_told(monkeypatch, code, said):
    monkeypatch.setattr("builtins.input", eofs)
    assert early_ends.why_no_input(raised(code)) == said


def eofs():
    raise EOFError("EOF when reading a line")


def test_a_file_with_the_name_of_a_module_is_told(tmp_path):
    (tmp_path / "random.py").write_text("def choose(): return 3\n")
    (tmp_path / "other.py").write_text("")
    error = raised("import random; random.choose()")
    explain(error, [str(tmp_path)])
    assert f"{tmp_path / 'random.py'} has the name of Python's own module 'random'" in str(error)
    assert early_ends.why_hidden(raised("import json; json.nothing"), [str(tmp_path)]) is None


@pytest.mark.job
@pytest.mark.parametrize("processes", [2, None])
def test_the_launcher_finds_python_s_own_modules(launcher, processes):
    job = launcher.job("print('well')", processes=processes)
    for name in ("random", "select", "types", "threading", "selectors", "tempfile"):
        (job.tree() / "code" / f"{name}.py").write_text("raise ValueError('not for the launcher')\n")
    code, log = launcher.run(job)
    assert code == 0, log
    assert log.count("well") == (processes or 1)


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "said"), [(ValueError("a \ud83d b"), r"a \ud83d b"), (Silent(), "__str__ of Silent raised")]
)
def test_errors_that_can_hardly_be_told(error, said):
    explain(error)
    record = parse_failure(format_failure(FailureRecord.of(1, "here", error, "trace \udcff")))
    assert said in record.message
    assert record.error_type == type(error).__name__


def test_what_a_rank_says_before_its_script_is_the_cause():
    loader = "python3: error while loading shared libraries: libpython3.so: cannot open shared object file"
    collector = FailureCollector(lambda rank: "here", mpirun=False)
    for text in ("a warning", loader, ""):
        collector.take(OutputLine(text, 1))
    cause = collector.first_cause(127, program="local_ranks", first_ended=0, first_failed=(1, 127))
    assert cause.headline == f"rank 1 (here): ended with exit code 127 before its script began: {loader}"
    collector.started.add(1)
    assert "called os._exit" in collector.first_cause(127, first_failed=(1, 127)).headline


@pytest.mark.job
def test_a_rank_that_dies_before_its_script_is_quoted(launcher, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'SMP_LAUNCH_REPORTS' in os.environ:\n"
        "    print('ImportError: no libfoo.so', file=sys.stderr)\n    os._exit(4)\n"
    )
    job = launcher.job("print('not reached')")
    code, log = launcher.run(job, environment={"PYTHONPATH": f"{tmp_path}:{PACKAGES}"})
    assert code == 4, log
    assert "ended with exit code 4 before its script began: ImportError: no libfoo.so" in job.failure()


# -- output ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 4096])
def test_lines_of_a_rank_keep_their_bytes(size):
    data = b"one\r\n\xff two\n" + b"x" * 5000 + b"\nend"
    lines = WholeLines()
    pieces = [lines.feed(data[at : at + size]) for at in range(0, len(data), size)] + [lines.finish()]
    assert b"".join(pieces) == data + b"\n"
    assert all(piece.endswith(b"\n") for piece in pieces if piece)


@pytest.mark.parametrize("tags", [None, "lines", "fragments"])
def test_a_long_line_is_cut_between_characters(monkeypatch, tags):
    monkeypatch.setattr(output, "_LONGEST_LINE", 100)
    text = "é€𝄞" * 200
    raw = text.encode()
    assembler, whole = LineAssembler(tags), WholeLines()
    data = raw + b"\nnext\n" if tags is None else b"[1,1]<stdout>:" + raw + b"\n[1,1]<stdout>:next\n"
    lines = [line for at in range(0, len(data), 7) for line in assembler.feed(data[at : at + 7])]
    assert "".join(line.text for line in lines[:-1]) == text
    assert len(lines) > 10
    assert {line.rank for line in lines} == {None if tags is None else 1}
    passed = b"".join(whole.feed(raw[at : at + 7]) for at in range(0, len(raw), 7)) + whole.finish()
    assert passed.decode().replace("\n", "") == text


def drain(folder):
    os.environ[REPORT_VARIABLE] = folder
    supervise._DRAIN_PATIENCE, supervise._LEFTOVER_PATIENCE = 0.1, 0.2
    rank = (
        "import os, sys; os.write(2, f'smp-started {sys.argv[1]} {os.getpid()}\\n'.encode()); "
        "print(('x' * 99 + '\\n') * 20000, end='')"
    )
    with StopRequests() as stop:
        collector = FailureCollector(lambda rank: "here", mpirun=False)
        supervisor = supervise.Supervisor(stop, collector, ranks=2, pipes=Path(folder))
        command = isolated_command("smp_launch.anywhere.local_ranks", "2", "--", sys.executable, "-S", "-c", rank, "{}")
        outcome = supervisor.run(command, os.environ, ".")
    print(outcome.returncode, outcome.overdue)


def test_all_output_is_read_however_slowly(tmp_path):
    """The ranks have ended long before, and each read takes longer than what leftovers of a job are given."""
    code = f"import test_ends_told; test_ends_told.drain({str(tmp_path)!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PACKAGES},
    )
    text = b""
    while piece := os.read(process.stdout.fileno(), 1 << 20):
        text += piece
        if len(text) < 1_000_000 or len(text) > 3_900_000:
            time.sleep(0.05)
    assert process.wait(30) == 0
    assert text.count(b"x" * 99 + b"\n") == 40_000
    assert text.endswith(b"0 None\n")


# -- what stands around ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"HOME": ""}])
def test_mpirun_has_a_home(given):
    assert os.path.isabs(as_root(given)["HOME"])
    assert as_root({"HOME": "/elsewhere"})["HOME"] == "/elsewhere"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 0), (signal.SIGTERM, 7)])
def test_what_nohup_ignores_stays_ignored(number, code):
    body = (
        "import os, signal, sys\nfrom smp_launch.machine.signals import StopRequests\n"
        "for each in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):\n    signal.signal(each, signal.SIG_IGN)\n"
        f"with StopRequests() as stop:\n    os.kill(os.getpid(), {int(number)})\n    sys.exit(7 if stop.read() else 0)"
    )
    assert subprocess.run([sys.executable, "-c", body], env={"PYTHONPATH": PACKAGES}).returncode == code


@pytest.mark.job
def test_a_job_whose_shell_ignores_signals_is_stopped(launcher):
    job = launcher.job("import time\nprint('ready')\ntime.sleep(60)")
    running = launcher.start(
        job, within=lambda words: ["bash", "-c", 'trap "" INT TERM HUP; exec "$@"', "bash", *words]
    )
    running.wait_for("ready", 2)
    running.process.terminate()
    assert running.wait() == 143
    assert "the job was stopped by SIGTERM" in job.failure()


def test_room_is_told_as_it_was(tmp_path, monkeypatch):
    error = OSError(28, "No space left on device")
    monkeypatch.setattr("smp_config.machine.disk_space.free_space", lambda folder: "0 bytes are free")
    note_room(error, tmp_path)
    monkeypatch.setattr("smp_config.machine.disk_space.free_space", lambda folder: "all bytes are free")
    assert "(0 bytes are free" in full_disk(error, tmp_path / "x")
    assert "ulimit -n" in no_more_files(OSError(24, "Too many open files"))
    assert no_more_files(OSError(2, "No such file")) is None


def test_room_of_shared_memory(tmp_path):
    assert has_room(tmp_path, 0)
    assert not has_room(tmp_path, 1 << 62)
    assert has_room(tmp_path / "missing", 1 << 62)
