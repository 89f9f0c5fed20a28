"""The examples for Transformers, in a loop and with its Trainer: the losses do not depend on how the job is divided."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.platform.jobs import ENTRYPOINTS

pytestmark = [pytest.mark.job, pytest.mark.full, pytest.mark.timeout(400)]


def _last_line(folder: Path, example: str, *words: str) -> str:
    pytest.importorskip("transformers")
    folder.mkdir()
    script = ENTRYPOINTS.parent / "examples" / f"{example}.py"
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, str(script), *words], cwd=folder, env=env, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def _numbers(line: str) -> list[float]:
    return [float(text) for text in re.findall(r"\d+\.\d{4}", line)]


def test_finetuning_is_the_same_however_it_is_divided(tmp_path: Path) -> None:
    saving = ["--checkpointing", "--offload"]
    tensor = _last_line(tmp_path / "tensor", "transformers_finetuning", "--strategy", "tensor", "--steps", "8", *saving)
    pipeline = _last_line(tmp_path / "pipeline", "transformers_finetuning", "--strategy", "pipeline", "--steps", "8")
    assert tensor.startswith("finetuning: strategy=tensor loss=")
    first, last, exported = _numbers(tensor)
    assert last < first
    assert exported < first, "what was exported is what was trained"
    assert _numbers(pipeline) == pytest.approx([first, last, exported], abs=2e-3)


def test_the_trainer_is_the_same_however_it_is_divided(tmp_path: Path) -> None:
    alone = _last_line(tmp_path / "alone", "trainer", "--strategy", "alone", "--steps", "6")
    tensor = _last_line(tmp_path / "tensor", "trainer", "--strategy", "tensor", "--steps", "6")
    first, last, evaluated = _numbers(alone)
    assert last < first
    assert evaluated < first
    assert _numbers(tensor) == pytest.approx([first, last, evaluated], abs=2e-3)
