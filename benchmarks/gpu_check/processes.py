"""Programs and jobs that a check starts, and the findings of their ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from gpu_check import environment
from gpu_check.results import emit, find_result

#: After the first rank has failed, the others get this time to end.
_SECONDS_AFTER_FAILURE = 15


def read_output(*command: str, timeout: float = 20) -> str:
    """Return what a command prints, or the error with which it could not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout + done.stderr).strip()


def run_program(
    name: str, command: Sequence[str], timeout: float = 60, environ: Mapping[str, str] | None = None
) -> None:
    """Run a program that imports the project, and emit its findings.

    A failure, or a program without a finding, is a finding too.

    Args:
        name: of the case.
        environ: variables beside those of this process.
    """
    begin = time.monotonic()
    # Its output is seen only if it ends before the driver ends this check.
    timeout = max(5.0, min(timeout, environment.count_seconds_left() - 4))
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env={**environment.make_program_environment(), **(environ or {})},
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        print(text[-3000:])
        emit(case=name, ok=False, error=f"no end within {timeout:.0f} s", last=text.strip().splitlines()[-2:])
        return
    has_result = False
    for line in done.stdout.splitlines():
        result = find_result(line)
        has_result = has_result or result is not None
        print(result or line, flush=True)
    print(done.stderr[-3000:], flush=True)
    if done.returncode or not has_result:
        last = (done.stdout + done.stderr).strip().splitlines()[-3:]
        emit(case=name, ok=False, exit=done.returncode, last=last)
    else:
        emit(case=f"{name} took", s=round(time.monotonic() - begin, 1))


def make_rank_command(function: Callable[..., None], *words: object) -> list[str]:
    """Return the command that runs a function of ``gpu_check.checks`` in a process of its own."""
    module = function.__module__.removeprefix("gpu_check.checks.")
    return [sys.executable, str(environment.PACKAGE), "rank", f"{module}:{function.__name__}", *map(str, words)]


def run_ranks(
    size: int,
    function: Callable[..., None],
    *words: object,
    environ: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> list[int]:
    """Run a function on all ranks of a job, without a launcher; the findings of rank 0 become those of this check.

    Args:
        size: number of ranks.
        function: a function of ``gpu_check.checks``.
        words: its arguments, which it gets as strings.
        environ: variables of the ranks; ``{rank}`` in a value is replaced by the number of the rank.
        timeout: seconds; None for the time that is left for this check.

    Returns:
        The exit status of each rank.
    """
    left = environment.count_seconds_left() - 5
    left = max(5.0, min(timeout or left, left))
    deadline = time.monotonic() + left
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(environment.find_free_port()),
        "SMPCHECK_DEADLINE": str(time.time() + left),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    processes = []
    for rank in range(size):
        own = {name: value.replace("{rank}", str(rank)) for name, value in (environ or {}).items()}
        processes.append(
            subprocess.Popen(
                make_rank_command(function, *words),
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        )
    logs: list[list[str]] = [[] for _ in processes]
    threads = [threading.Thread(target=_relay, args=each) for each in zip(range(size), processes, logs, strict=True)]
    for thread in threads:
        thread.start()
    _wait(processes, deadline)
    killed = [process.poll() is None for process in processes]
    for process in processes:
        process.kill()
    for thread in threads:
        thread.join(10)
    codes = [process.wait() for process in processes]
    if any(codes):
        for rank, log in enumerate(logs):
            print(f"--- rank {rank} of {size}, {function.__name__} {words}: exit {codes[rank]}, killed: {killed[rank]}")
            # Indented, so that findings of other ranks are not taken for those of the check.
            print("".join(f"  {line}" for line in log[-60:]), flush=True)
        last = [log[-1][:300] if log else "" for log in logs]
        emit(case=f"{function.__name__} ranks", ok=False, exits=codes, ended_by_us=killed, last=last)
    return codes


def _relay(rank: int, process: subprocess.Popen[str], log: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if rank == 0 and find_result(line) == line:
            print(line, end="", flush=True)
        else:
            log.append(line)


def _wait(processes: Sequence[subprocess.Popen[str]], deadline: float) -> None:
    """Block until all processes have ended, the deadline has passed, or one has failed some time ago."""
    failed_at = None
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if failed_at is None and any(process.poll() not in (None, 0) for process in processes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > _SECONDS_AFTER_FAILURE:
            return
        time.sleep(0.1)  # polling: subprocess cannot wait for several processes
