"""The leader and its other hosts, with a stand-in for ssh that runs the login program on this machine."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from smp_launch.errors import LaunchError, Stopped
from smp_launch.machine.locked_folders import LeaderStatus, StatusDir
from smp_launch.machine.signals import StopRequests
from smp_launch.remote.login import FOLLOW, environment_of
from smp_launch.remote.remote_hosts import PATIENCE_VARIABLE, RemoteHosts
from smp_launch.remote.ssh import PORT_VARIABLE, TRUSTED_VARIABLE, Client, read_port, trusted_addresses

PACKAGES = Path(__file__).resolve().parents[2] / "container"


@pytest.fixture
def stop():
    with StopRequests() as requests:
        yield requests


@pytest.fixture
def client(tmp_path):
    """``client(before)``: a client whose ssh first runs the shell words ``before``."""

    def make(before: str = "") -> Client:
        program = tmp_path / "ssh"
        program.write_text(
            f"#!/bin/sh\n{before}\n"
            f'PYTHONPATH={PACKAGES} SSH_ORIGINAL_COMMAND="$4" exec {sys.executable} -m smp_launch.remote.login '
            f"{os.getpid()} $3 {tmp_path}/status-$3\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
        return Client(str(program), tmp_path / "config")

    return make


def test_hosts_learn_how_the_job_ended(client, stop, tmp_path):
    hosts = ["algo-2", "algo-3"]
    dirs = [StatusDir(tmp_path / f"status-{host}") for host in hosts]
    with RemoteHosts.reach(hosts, client(), stop, {}) as followers:
        assert all(d.leader_started() for d in dirs)
        assert followers.lost() == []
        assert len(followers.pids) == 2
        followers.publish(LeaderStatus(3, "rank 1 failed"))
        assert [d.wait_for_end() for d in dirs] == [LeaderStatus(3, "rank 1 failed")] * 2


def test_hosts_learn_that_the_leader_died(client, stop, tmp_path):
    with RemoteHosts.reach(["algo-2"], client(), stop, {}):
        pass
    assert StatusDir(tmp_path / "status-algo-2").wait_for_end() is None


def test_a_lost_host_is_seen(client, stop):
    with RemoteHosts.reach(["algo-2", "algo-3"], client(), stop, {}) as followers:
        followers._connections[1].process.kill()
        followers._connections[1].process.wait(5)
        assert followers.lost() == ["algo-3"]
        assert time.time() - followers.lost_when < 5


def test_a_host_that_comes_late_is_waited_for(client, stop, tmp_path):
    late = tmp_path / "late"
    threading.Timer(0.5, late.touch).start()
    with RemoteHosts.reach(["algo-2"], client(f"[ -e {late} ] || exit 255"), stop, {}) as followers:
        assert late.exists()
        assert followers.lost() == []


def test_a_host_that_never_comes_is_named_with_ssh_s_reason(client, stop):
    refused = client("echo 'connect to host algo-2 port 22: Connection refused' >&2; exit 255")
    with pytest.raises(LaunchError, match=r"1 of 1 other host\(s\).* within 0.5 s \(algo-2: .*Connection refused\)"):
        RemoteHosts.reach(["algo-2"], refused, stop, {PATIENCE_VARIABLE: "0.5"})


def test_a_stop_ends_the_wait(client, stop):
    threading.Timer(0.3, lambda: os.kill(os.getpid(), 15)).start()
    with pytest.raises(Stopped, match="stopped by SIGTERM before its ranks had started"):
        RemoteHosts.reach(["algo-2"], client("exit 255"), stop, {})


def test_a_login_gets_the_environment_of_its_host_s_launcher(tmp_path, client):
    command = client().command("algo-2", "echo $CURRENT_HOST; env")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, env={"PATH": os.environ["PATH"], "A": "b"}
    )
    assert done.stdout.startswith("algo-2\n"), done.stderr
    assert "A=b" not in done.stdout.splitlines()
    assert f"PATH={environment_of(os.getpid())['PATH']}" in done.stdout.splitlines()


def test_there_is_no_shell(tmp_path, client):
    done = subprocess.run(client().command("algo-2", ""), capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert FOLLOW not in done.stderr


def test_the_leader_s_address(stop):
    assert {"127.0.0.1", "::1"} & set(trusted_addresses("localhost", stop, {}, 1))
    assert trusted_addresses("nowhere", stop, {TRUSTED_VARIABLE: "10.0.0.0/8, ::1"}, 1) == ["10.0.0.0/8", "::1"]
    with pytest.raises(LaunchError, match=rf"'nowhere.invalid' is unknown.*{TRUSTED_VARIABLE}"):
        trusted_addresses("nowhere.invalid", stop, {}, 0)


@pytest.mark.parametrize("given", ["0", "ssh", "65536", "-1"])
def test_a_port_that_is_none(given):
    assert read_port({}) == "22"
    with pytest.raises(LaunchError, match="use a number from 1 to 65535"):
        read_port({PORT_VARIABLE: given})


@pytest.mark.parametrize("banner", ["echo 'Welcome to the host'", "printf 'Last login\\r\\n\\n'; sleep 0.3; echo"])
def test_a_banner_before_the_answer_is_passed_over(client, stop, banner):
    with RemoteHosts.reach(["algo-2"], client(banner), stop, {PATIENCE_VARIABLE: "30"}) as followers:
        assert followers.lost() == []


def test_a_host_that_begins_to_speak_and_falls_silent_ends_the_patience(client, stop):
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"within 3 s \(algo-2: it said 'Enter pass', but not that it is ready\)"):
        RemoteHosts.reach(["algo-2"], client("printf 'Enter pass'; exec sleep 60"), stop, {PATIENCE_VARIABLE: "3"})
    assert time.monotonic() - began < 30


def test_a_helper_that_holds_the_messages_does_not_hold_the_leader(client, stop):
    began = time.monotonic()
    proxy = client("echo 'proxy: no route' >&2; sleep 60 >/dev/null & exit 255")
    with pytest.raises(LaunchError, match=r"algo-2: proxy: no route"):
        RemoteHosts.reach(["algo-2"], proxy, stop, {PATIENCE_VARIABLE: "3"})
    assert time.monotonic() - began < 30
