"""The variable by which a job is told to answer calls of ``torch.cuda`` on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

#: ``1``: emulate, unless there is a GPU; ``checked`` or ``checked:SEED``: on devices that check the order of work, unless
#: there is a GPU; ``0``: leave ``torch.cuda`` alone. Unset counts as 0.
VARIABLE = "SMP_EMULATE_CUDA"
_CHECKED = "checked"


def is_asked_for(environ: Mapping[str, str]) -> bool:
    """Whether an environment asks for the emulation."""
    return environ.get(VARIABLE) == "1" or seed_of_checks(environ) is not None


def seed_of_checks(environ: Mapping[str, str]) -> int | None:
    """The seed of the order in which checked devices execute work; None where others are asked for, or none.

    Raises:
        ValueError: it is no number.
    """
    name, colon, seed = environ.get(VARIABLE, "").partition(":")
    if name != _CHECKED:
        return None
    if not colon:
        return 0
    if not seed.isdigit():
        raise ValueError(
            f"{VARIABLE} is {environ[VARIABLE]!r}, but what follows the colon is the seed of an order of work, a whole number; "
            f"set it to {_CHECKED}:7, for example"
        )
    return int(seed)
