"""The variable that makes a job run calls of ``torch.cuda`` on the CPU."""

from __future__ import annotations

import re
from collections.abc import Mapping

from smp_config.errors import ConfigError, show_value

#: ``1``: emulate, unless there is a GPU; ``checked`` or ``checked:SEED``: on devices that check the order of work, unless
#: there is a GPU; ``0``: leave ``torch.cuda`` alone. Unset counts as 0.
VARIABLE = "SMP_EMULATE_CUDA"
_CHECKED = "checked"

#: Of its seed.
_MOST_DIGITS = 18

#: Emulated devices of a host, one for each of its ranks if it is not set; with fewer, ranks share them.
DEVICES_VARIABLE = "SMP_EMULATE_CUDA_DEVICES"
_MOST_DEVICES = 1024
#: Memory of each emulated device, for example ``2GiB``.
MEMORY_VARIABLE = "SMP_EMULATE_CUDA_MEMORY"
#: ``1``: print figures of the steps, and the faults that they show, when a rank ends.
REPORT_VARIABLE = "SMP_EMULATE_CUDA_REPORT"
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?(KiB|MiB|GiB|TiB)")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def is_asked_for(environ: Mapping[str, str]) -> bool:
    """Return whether an environment asks for the emulation; raise ConfigError for an unknown value."""
    if seed_of_checks(environ) is not None:
        return True
    text = environ.get(VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ConfigError(
            f"{VARIABLE} is {show_value(text)}; it says whether calls of torch.cuda act on the CPU where there is no GPU: set "
            "1, or "
            f"0, or {_CHECKED} for devices that check the order of work",
            code="SMP106",
        )
    return text == "1"


def seed_of_checks(environ: Mapping[str, str]) -> int | None:
    """Return the seed for the order in which checked devices execute work.

    Returns:
        None if the environment asks for other devices, or for none.

    Raises:
        ConfigError: If the seed is not a number.
    """
    name, colon, seed = environ.get(VARIABLE, "").partition(":")
    if name != _CHECKED:
        return None
    if not colon:
        return 0
    if not (seed.isascii() and seed.isdigit()) or len(seed) > _MOST_DIGITS:
        raise ConfigError(
            f"{VARIABLE} is {show_value(environ[VARIABLE])}, but what follows the colon is the seed of an order of work, a whole "
            f"number; set it to {_CHECKED}:7, for example",
            code="SMP106",
        )
    return int(seed)


def device_count(environ: Mapping[str, str]) -> int | None:
    """Return the number of emulated devices of a host, or None if the environment sets none.

    Raises:
        ConfigError: If the value is not a number of devices.
    """
    text = environ.get(DEVICES_VARIABLE, "")
    if not text:
        return None
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else 0
    if not 1 <= number <= _MOST_DEVICES:
        raise ConfigError(
            f"{DEVICES_VARIABLE} is {show_value(text)}; it is the number of emulated devices of a host, which its ranks share if "
            f"there are fewer than ranks: set 1 to {_MOST_DEVICES}, or leave it out for one for each rank",
            code="SMP106",
        )
    return number


def memory_limit(environ: Mapping[str, str]) -> int | None:
    """Return the bytes of memory of each emulated device, or None if the environment sets none.

    Raises:
        ConfigError: If the value is not a size.
    """
    text = environ.get(MEMORY_VARIABLE, "")
    if not text:
        return None
    found = _SIZE.fullmatch(text)
    size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not size:
        raise ConfigError(
            f"{MEMORY_VARIABLE} is {show_value(text)}; it is the memory of each emulated device: set a number and KiB, MiB, GiB or "
            "TiB, for example 2GiB",
            code="SMP106",
        )
    return size


def wants_report(environ: Mapping[str, str]) -> bool:
    """Return whether ranks print figures of their emulated device when they end; raise ConfigError for an unknown value."""
    text = environ.get(REPORT_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ConfigError(
            f"{REPORT_VARIABLE} is {show_value(text)}; it says whether ranks print figures of their emulated device: set 1 or 0",
            code="SMP106",
        )
    return text == "1"
