"""Hosts with names of their own on this machine, and stand-ins for ssh and its server between them.

Each host's launcher runs in namespaces of its own (host name, ``/etc/hosts``), which root may make. A login to a host runs in that
host's namespaces what the real server would run there, without a network between them.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[3] / "container"

#: Listens where it should, and leaves the program of every login where the other one finds it.
_SERVER = """\
#!{python}
import os, re, socket, sys
text = open(sys.argv[sys.argv.index("-f") + 1]).read()
login = re.search("ForceCommand (.*)", text)[1]
path = os.path.join({folder!r}, "login-" + login.split()[-2])
with open(path + ".new", "w") as file:
    file.write(login)
os.rename(path + ".new", path)
with socket.create_server(("127.0.0.1", int(re.search("Port ([0-9]+)", text)[1]))) as server:
    while True:
        server.accept()[0].close()
"""

_CLIENT = """\
#!{python}
import os, shlex, sys
options, host, words = sys.argv[1:3], sys.argv[3], sys.argv[4:]
while host.startswith("-"):
    host, words = words[0], words[1:]
try:
    login = shlex.split(open(os.path.join({folder!r}, "login-" + host)).read())
    os.kill(int(login[-3]), 0)
except OSError as error:
    sys.exit(f"connect to host {{host}}: Connection refused ({{error}})")
environ = {{"PATH": os.environ["PATH"], "PYTHONPATH": {packages!r}, "SSH_ORIGINAL_COMMAND": " ".join(words)}}
os.execvpe("nsenter", ["nsenter", "-t", login[-3], "-u", "-m", "--", *login], environ)
"""


def can_be_made() -> bool:
    """Whether this user and this machine have what it takes."""
    if os.geteuid() or not all(map(shutil.which, ("unshare", "nsenter", "mount", "hostname", "ssh-keygen"))):
        return False
    words = ["unshare", "--uts", "--mount", "hostname", "algo-1"]
    return interface() is not None and subprocess.run(words, capture_output=True).returncode == 0


def interface() -> tuple[str, str] | None:
    """A network interface that is up and no loopback, and its address; None without: mpirun takes no loopback between hosts."""
    try:
        said = subprocess.run(
            ["ip", "-4", "-o", "addr", "show", "up", "scope", "global"], capture_output=True, text=True
        )
    except OSError:
        return None
    found = [line.split() for line in said.stdout.splitlines()]
    usable = [(words[1], words[3].partition("/")[0]) for words in found if not words[1].startswith("docker")]
    return usable[0] if usable else None


def make_stand_ins(folder: Path) -> None:
    """``ssh`` and ``sshd`` in ``folder/bin``."""
    (folder / "bin").mkdir(parents=True)
    for name, text in (("sshd", _SERVER), ("ssh", _CLIENT)):
        program = folder / "bin" / name
        program.write_text(text.format(python=sys.executable, folder=str(folder), packages=str(PACKAGES)))
        program.chmod(program.stat().st_mode | stat.S_IEXEC)


def command(folder: Path, host: str, hosts: Sequence[str], program: Sequence[str]) -> list[str]:
    """Run a program on a host."""
    names, (_, address) = folder / "hosts", interface() or ("", "127.0.0.1")
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name in hosts))
    script = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
    return ["unshare", "--uts", "--mount", "sh", "-c", script, host, str(names), *program]


def processes_of(pid: int) -> list[int]:
    """All processes of the host on which a process runs."""
    name, found = os.readlink(f"/proc/{pid}/ns/uts"), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "ns" / "uts") == name:
                found.append(int(entry.name))
        except OSError:
            continue
    return found
