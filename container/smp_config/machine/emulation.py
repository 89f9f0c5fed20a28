"""The variable that makes a job run calls of ``torch.cuda`` on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

from smp_config.errors import ConfigError, show_value

#: ``1``: emulate, unless there is a GPU; ``checked`` or ``checked:SEED``: on devices that check the order of work, unless
#: there is a GPU; ``0``: leave ``torch.cuda`` alone. Unset counts as 0.
VARIABLE = "SMP_EMULATE_CUDA"
_CHECKED = "checked"

#: Of its seed.
_MOST_DIGITS = 18


def is_asked_for(environ: Mapping[str, str]) -> bool:
    """Return whether an environment asks for the emulation; raise ConfigError for an unknown value."""
    if seed_of_checks(environ) is not None:
        return True
    text = environ.get(VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ConfigError(
            f"{VARIABLE} is {show_value(text)}; it says whether calls of torch.cuda act on the CPU where there is no GPU: set "
            "1, or "
            f"0, or {_CHECKED} for devices that check the order of work"
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
            f"number; set it to {_CHECKED}:7, for example"
        )
    return int(seed)
