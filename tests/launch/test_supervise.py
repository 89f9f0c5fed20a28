"""What the launcher waits for when the program that holds the ranks ends."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from smp_launch.failures.failure import FailureCollector
from smp_launch.machine.processes import find_descendants, kill_descendants
from smp_launch.machine.signals import StopRequests
from smp_launch.supervision import supervise


def supervised(code, **options):
    """Run a program of Python under a supervisor; gives how it ended."""
    with StopRequests() as stop:
        collector = FailureCollector(lambda rank: "here", mpirun=False)
        supervisor = supervise.Supervisor(stop, collector, **options)
        return supervisor.run([sys.executable, "-S", "-c", code], os.environ, ".")


def supervise_without_patience():
    supervise._DRAIN_PATIENCE = 1000.0
    outcome = supervised("import os, time; os.close(1); os.close(2); time.sleep(0.3); os._exit(3)")
    print(outcome.returncode, outcome.overdue)


def _told_by(function):
    """What a function of this file prints, in a process of its own: the launcher takes over the alarm by which tests end, and
    ends everything below it.
    """
    return subprocess.run(
        [sys.executable, "-c", f"import test_supervise; test_supervise.{function.__name__}()"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
        env=_with_path(),
    )


def test_a_program_whose_output_has_ended_before_it_is_not_waited_for():
    """Nothing would wake the launcher up before its patience is over."""
    told = _told_by(supervise_without_patience)
    assert told.stdout == "3 None\n", told.stderr


def _with_path():
    packages = str(Path(__file__).resolve().parents[2] / "container")
    return {**os.environ, "PYTHONPATH": packages}


def supervise_beside_another():
    read, write = os.pipe()
    kept = os.fork()
    if kept == 0:
        child = os.fork()
        if child:
            os.write(write, str(child).encode())
            os.waitpid(child, 0)
            os.write(write, b"ended")
        while True:
            os.read(os.pipe()[0], 1)
    try:
        child = int(os.read(read, 20))
        ended = os.pidfd_open(child)
        outcome = supervised("pass", spare=(kept,))
        assert (outcome.returncode, outcome.overdue) == (0, None)
        assert select.select([read], [], [], 10.0)[0]
        assert os.read(read, 20) == b"ended"
        assert kept in find_descendants()
    finally:
        kill_descendants()
        os.waitpid(kept, 0)
        for descriptor in (read, write, ended):
            os.close(descriptor)
    print("lived on")


def test_a_process_that_outlives_a_start_lives_on_and_what_it_has_started_does_not():
    """As the process that makes imports for the next start, with a rank that it has forked."""
    told = _told_by(supervise_beside_another)
    assert told.stdout == "lived on\n", told.stderr
