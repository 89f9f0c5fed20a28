"""A script as processes of a pool run it: what it does as a job, without the processes and the imports of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def _run(script: str, words: list[str]) -> None:
    import runpy
    import sys

    before, sys.argv = sys.argv, [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = before


def run_script(
    ranks: Callable[..., list[Any]],
    script: Path,
    processes: int,
    parameters: Mapping[str, Any],
    output: Path,
    **hyperparameters: Any,
) -> None:
    """Run ``script``, which calls ``smp.init()`` itself, to its end.

    Args:
        ranks: the fixture.
        parameters: of the library.
        output: ``SM_OUTPUT_DATA_DIR`` of all ranks, made anew.
    """
    output.mkdir(parents=True)
    words = [word for name, value in hyperparameters.items() for word in (f"--{name}", str(value))]
    environment = {
        "SM_HP_MP_PARAMETERS": json.dumps(parameters),
        "SM_OUTPUT_DATA_DIR": str(output),
        "SMP_CHECKPOINT_DIR": str(output / "checkpoints"),
    }
    ranks(_run, processes, str(script), words, init=False, env=environment, timeout=150.0)
