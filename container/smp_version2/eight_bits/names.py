"""Names of ``transformer_engine`` that are not there."""

from __future__ import annotations

from typing import NoReturn


def missing_name(name: str) -> NoReturn:
    """Raise Python's error for a name that a module does not have, with what helps.

    Raises:
        AttributeError: always.
    """
    raise AttributeError(
        f"transformer_engine is not installed, and what stands in for it has no {name}: install transformer_engine, or use "
        "PyTorch's modules, whose nn.Linear multiply in 8 bits inside fp8_autocast"
    )
