"""The variable by which a job is told to answer calls of ``torch.cuda`` on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

#: ``1``: emulate, unless there is a GPU; ``0``: leave ``torch.cuda`` alone. Unset counts as 0.
VARIABLE = "SMP_EMULATE_CUDA"


def is_asked_for(environ: Mapping[str, str]) -> bool:
    """Whether an environment asks for the emulation."""
    return environ.get(VARIABLE) == "1"
