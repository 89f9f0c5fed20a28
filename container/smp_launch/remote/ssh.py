"""The way from the leader to the other hosts: keys and settings that are made for one job and vanish with it.

No key is in the image and none is carried between hosts. The leader makes its own key. A worker accepts every login
*from the leader's address*, with any key, and refuses all others. So a login is only as trustworthy as addresses in
the job's network, where no other machine can take the leader's. The traffic is encrypted.
Only the leader logs in (its mpirun starts every daemon itself), so only workers listen.
"""

from __future__ import annotations

import os
import select
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smp_launch.errors import LaunchError, Stopped

if TYPE_CHECKING:
    from smp_launch.machine.signals import StopRequests

#: The port of the hosts' ssh servers.
PORT_VARIABLE = "SMP_LAUNCH_SSH_PORT"
_STANDARD_PORT = "22"

#: Addresses (or networks as a.b.c.d/n, separated by commas) that may log in; needed if the leader's name does not resolve.
TRUSTED_VARIABLE = "SMP_LAUNCH_TRUSTED_ADDRESSES"

#: Seconds for ssh's server to listen.
_SERVER_PATIENCE = 10.0

#: Seconds between two looks for the server's start, and for the leader's address.
_LOOK_EVERY = 0.02
_ASK_EVERY = 0.1

_CLIENT_SETTINGS = """\
Host *
    IdentityFile {folder}/key
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking accept-new
    BatchMode yes
    PreferredAuthentications publickey
    ForwardAgent no
    ForwardX11 no
    ConnectTimeout 5
    ServerAliveInterval 15
    ServerAliveCountMax 4
    LogLevel ERROR
    Port {port}
"""

_SERVER_SETTINGS = """\
Port {port}
HostKey {folder}/host_key
PidFile none
LogLevel ERROR
UsePAM no
AuthenticationMethods publickey
AuthorizedKeysFile none
PasswordAuthentication no
ChallengeResponseAuthentication no
PermitRootLogin no
PermitTTY no
PermitTunnel no
PermitUserEnvironment no
PermitUserRC no
AllowAgentForwarding no
AllowTcpForwarding no
AllowStreamLocalForwarding no
X11Forwarding no
ClientAliveInterval 15
ClientAliveCountMax 4
Match Address {trusted}
    PermitRootLogin prohibit-password
    AuthorizedKeysCommand {echo} %t %k
    AuthorizedKeysCommandUser nobody
    ForceCommand {login}
"""


@dataclass(frozen=True)
class Client:
    """The leader's side.

    Attributes:
        program: the path of ssh.
        settings: its configuration file, in a folder with the key and the hosts' keys seen so far.
    """

    program: str
    settings: Path

    @classmethod
    def create(cls, folder: Path, environ: Mapping[str, str]) -> Client:
        """Make a key and settings below ``folder``; raises LaunchError if there is no ssh."""
        client, keygen = _program("ssh"), _program("ssh-keygen")
        _make_key(keygen, folder / "key")
        settings = folder / "config"
        settings.write_text(_CLIENT_SETTINGS.format(folder=folder, port=read_port(environ)), encoding="utf-8")
        return cls(client, settings)

    @property
    def agent(self) -> str:
        """Return the command with which mpirun reaches a host.

        Its daemons look for the first word too, so that program must exist everywhere.
        """
        return f"{self.program} -F {self.settings}"

    def command(self, host: str, *words: str) -> list[str]:
        """Run ``words`` on ``host``."""
        return [self.program, "-F", str(self.settings), host, *words]


@contextmanager
def serve_ssh(folder: Path, trusted: Sequence[str], login: Sequence[str], environ: Mapping[str, str]) -> Iterator[None]:
    """Let the leader log in while this lasts.

    Args:
        folder: private to this user.
        trusted: addresses or networks that may log in.
        login: the program that every login runs, whatever it asked for.

    Raises:
        LaunchError: there is no ssh server, or it does not start.
    """
    server, keygen, echo = _program("sshd"), _program("ssh-keygen"), _program("echo")
    _make_key(keygen, folder / "host_key")
    settings = folder / "sshd_config"
    text = _SERVER_SETTINGS.format(
        port=read_port(environ), folder=folder, trusted=",".join(trusted), echo=echo, login=shlex.join(login)
    )
    settings.write_text(text, encoding="utf-8")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # the server gives up its rights there
    process = subprocess.Popen(
        # Not as a daemon (-D), which this process could neither watch nor end.
        [server, "-D", "-e", "-f", str(settings)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"PATH": environ.get("PATH", os.defpath)},
        # Signals of the terminal are not for the server: it ends with this block.
        start_new_session=True,
    )
    try:
        _wait_until_listening(process, int(read_port(environ)))
        yield
    finally:
        process.terminate()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def read_port(environ: Mapping[str, str]) -> str:
    """Return the port of every host's ssh server."""
    given = environ.get(PORT_VARIABLE, _STANDARD_PORT)
    if not given.isdigit() or not 0 < int(given) < 65536:
        raise LaunchError(
            f"{PORT_VARIABLE} is {given!r}, not a port; the hosts' ssh servers listen there; "
            f"use a number from 1 to 65535, the same on all hosts, or leave it out for {_STANDARD_PORT}",
            code="SMP203",
        )
    return given


def trusted_addresses(leader: str, stop: StopRequests, environ: Mapping[str, str], patience: float) -> list[str]:
    """Return the addresses that may log in: the user's, or the leader's in the job's network.

    Args:
        patience: seconds for the name to become known; the leader may start later than this host.

    Raises:
        LaunchError: the name stays unknown.
        Stopped: a request to stop came meanwhile.
    """
    given = [word.strip() for word in environ.get(TRUSTED_VARIABLE, "").split(",") if word.strip()]
    if given:
        return given
    deadline = time.monotonic() + patience
    while True:
        try:
            found = socket.getaddrinfo(leader, None, type=socket.SOCK_STREAM)
            return sorted({str(entry[4][0]).partition("%")[0] for entry in found})
        except OSError as error:
            if time.monotonic() >= deadline:
                raise LaunchError(
                    f"the address of the leader {leader!r} is unknown: {error} (asked for {patience:g} s); only the leader may "
                    f"log in to this host; make the name known to it, or set {TRUSTED_VARIABLE} to the address",
                    code="SMP203",
                ) from None
            is_stop, _, _ = select.select([stop], [], [], _ASK_EVERY)
            names = stop.read() if is_stop else []
            if names:
                raise Stopped(names[0]) from None


def _program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/usr/bin:/bin")
    if found is None:
        raise LaunchError(
            f"{name} is missing: neither PATH nor the usual folders have it, and a job over several hosts starts its ranks "
            "through ssh; install openssh-client and openssh-server in the image",
            code="SMP203",
        )
    return os.path.realpath(found)


def _make_key(keygen: str, path: Path) -> None:
    done = subprocess.run(
        [keygen, "-q", "-t", "ed25519", "-N", "", "-C", "smp-launch", "-f", str(path)],
        # The program asks before it overwrites a key, and here is no one to answer.
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode:
        raise LaunchError(
            f"ssh-keygen could not make a key: {done.stderr.strip()}; it was to write {path}; "
            "see that the folder for temporary files (TMPDIR) is writable",
            code="SMP203",
        )


def _wait_until_listening(process: subprocess.Popen[bytes], number: int) -> None:
    deadline = time.monotonic() + _SERVER_PATIENCE
    while True:
        if process.poll() is not None:
            said = process.stderr.read().decode("utf-8", "replace").strip() if process.stderr else ""
            raise LaunchError(
                f"the ssh server ended with code {process.returncode}: {said or 'it said nothing'}; it was to listen on port "
                f"{number}; run the container as root, or set {PORT_VARIABLE} to a free port on all hosts",
                code="SMP203",
            )
        try:
            with socket.create_connection(("localhost", number), timeout=1):
                return
        except OSError:
            if time.monotonic() >= deadline:
                raise LaunchError(
                    f"the ssh server does not listen on port {number} after {_SERVER_PATIENCE:g} s; its messages are in the "
                    f"log; set {PORT_VARIABLE} to a free port on all hosts",
                    code="SMP203",
                ) from None
            # The server does not report when it listens; only a connection shows it.
            time.sleep(_LOOK_EVERY)


def login_program(pid: int, host: str, status_dir: Path) -> list[str]:
    """Return the program that a login to this host runs, see :mod:`smp_launch.remote.login`."""
    return [sys.executable, "-m", "smp_launch.remote.login", str(pid), host, str(status_dir)]
