"""The files in which the platform describes a job, and checks of their values. The errors name what cannot be used.

Any platform, or a person with an editor, may write these files. So every field that becomes a path, a variable or a
word of a command line is checked before it does.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp_config.errors import ConfigError, kind_of, show_value
from smp_config.formats import strict_json
from smp_config.formats.secrets import shown_value
from smp_config.limits import MOST_RANKS

#: Of one file; the service's limits allow a few hundred thousand.
MOST_BYTES = 8 << 20

#: A host's name becomes a folder if hosts are simulated, and a word of mpirun's --host, in which : and , split names.
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")

#: A channel's name is that of its folder.
_CHANNEL = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,255}")

#: One interface or several; the system's own names have at most 15 characters.
_INTERFACE = re.compile(r"(?!\.)[A-Za-z0-9._:@,-]{1,64}")

#: Characters of a hyperparameter's name, as the service has them.
_LONGEST_NAME = 256


def text_of(path: Path) -> str:
    """Return the text of one of the files.

    Raises:
        OSError: it cannot be read, or is no file.
        ConfigError: it is too large for a file of the platform.
    """
    # Without waiting for a writer, if a pipe stands in the file's place.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(0, "it is not a file")
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ConfigError(
            f"{path} has {max(about.st_size, len(data)):,} bytes; the platform describes a job in some thousand, and the launcher "
            f"reads at most {MOST_BYTES:,}: see what has been written there, and put large content into a channel",
            code="SMP201",
        )
    return data.decode("utf-8")


def check_resources(found: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError, naming the field, for a ``resourceconfig.json`` that does not describe hosts."""
    hosts = found.get("hosts")
    if not isinstance(hosts, list) or not hosts or not all(isinstance(name, str) for name in hosts):
        raise ConfigError(
            f"{path} has hosts={show_value(hosts)}; the launcher lays the ranks over this "
            'list; it must be a list of host names such as ["algo-1"]',
            code="SMP201",
        )
    for name in hosts:
        if not _HOST.fullmatch(name):
            raise ConfigError(
                f"{path} has the host {show_value(name)} ({len(name)} characters); its name becomes a word of mpirun's "
                "--host: use at "
                'most 253 letters, digits, dots, hyphens and underscores, such as "algo-1"',
                code="SMP201",
            )
    if len(set(hosts)) < len(hosts) or len(hosts) > MOST_RANKS:
        raise ConfigError(
            f"{path} has hosts={show_value(hosts)}, {len(hosts):,} names of which {len(set(hosts)):,} differ; ranks are laid "
            "over each "
            f"host once, and over at most {MOST_RANKS:,}: list every host once",
            code="SMP201",
        )
    check_names(found, path)
    interface = found.get("network_interface_name")
    if interface and not _INTERFACE.fullmatch(interface):
        raise ConfigError(
            f"{path} has network_interface_name={show_value(interface)}; the hosts reach one another by it, and no interface "
            "is called "
            'that: write its name such as "eth0", or leave it out',
            code="SMP201",
        )
    _check_groups(found.get("instance_groups"), path)


def check_names(found: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for a name in ``resourceconfig.json`` that is no text; the rest of the file is not looked at."""
    for field in ("current_host", "current_instance_type", "current_group_name", "network_interface_name"):
        value = found.get(field)
        if value is not None and not isinstance(value, str):
            raise ConfigError(
                f"{path} has {field}={show_value(value)}, {kind_of(value)}; it is a name: write it as text, or leave it out",
                code="SMP201",
            )


def _check_groups(groups: Any, path: Path) -> None:
    if groups is None:
        return
    wrong = f"{path} has instance_groups={show_value(groups)}"
    right = (
        'write a list such as [{"instance_group_name": "workers", "instance_type": "ml.p4d.24xlarge", "hosts": ["algo-1"]}], or '
        "leave it out"
    )
    if not isinstance(groups, list):
        raise ConfigError(f"{wrong}, {kind_of(groups)}; it lists groups of hosts: {right}", code="SMP201")
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping):
            raise ConfigError(
                f"{wrong}, and the group at {number} is {kind_of(group)}; each is an object: {right}", code="SMP201"
            )
        name, hosts = group.get("instance_group_name"), group.get("hosts", [])
        if not isinstance(name, str):
            raise ConfigError(
                f"{wrong}, and the group at {number} has instance_group_name={show_value(name)}; it is called by that: {right}",
                code="SMP201",
            )
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            raise ConfigError(
                f"{wrong}, and the group {name!r} has hosts={show_value(hosts)}; these are names: {right}",
                code="SMP201",
            )


def check_channels(found: Mapping[str, Any], path: Path) -> None:
    """Check that every channel of an ``inputdataconfig.json`` can have a folder.

    Raises:
        ConfigError: a channel has an unusable name, or is not described by an object. The error names the channel.
    """
    for name, channel in found.items():
        if not _CHANNEL.fullmatch(name):
            raise ConfigError(
                f"{path} has a channel called {show_value(name)}; its data lies in a folder of that name below input/data: "
                "use at most "
                "255 letters, digits, dots, hyphens and underscores",
                code="SMP201",
            )
        if not isinstance(channel, Mapping):
            raise ConfigError(
                f"{path} has {show_value(channel)}, {kind_of(channel)}, for the channel {name!r}; a channel is described by an "
                'object: write for example {"TrainingInputMode": "File"}',
                code="SMP201",
            )


def check_hyperparameters(found: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError, naming it, for a hyperparameter that no command line and no variable can hold.

    Args:
        found: what their texts stand for.
        where: the file that they come from.
    """
    for name, value in found.items():
        if not name or "=" in name or len(name) > _LONGEST_NAME:
            raise ConfigError(
                f"{where} has a hyperparameter called {show_value(name)} ({len(name)} characters); it becomes the variable "
                "SM_HP_… of "
                f"that name: use a name of 1 to {_LONGEST_NAME} characters without '='",
                code="SMP201",
            )
        if why := strict_json.unusable_text({name: value}):
            raise ConfigError(
                f"{where} has the hyperparameters {shown_value(None, {name: value})}: {why}; each is handed "
                "to the script as a word of its command line: remove that character",
                code="SMP201",
            )
