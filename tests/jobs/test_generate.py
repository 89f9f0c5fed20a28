"""The example of generation: the same texts as in one process, whatever the strategy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.platform.jobs import ENTRYPOINTS

pytestmark = [pytest.mark.job, pytest.mark.full, pytest.mark.timeout(240)]


def _texts(folder, model, strategy):
    pytest.importorskip("transformers")
    folder.mkdir()
    example = ENTRYPOINTS.parent / "examples" / "generate.py"
    words = ["--model", model, "--strategy", strategy, "--steps", "20"]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, str(example), *words], cwd=folder, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"generate: model={model} strategy={strategy} loss=")
    return json.loads((folder / "generate" / "samples.json").read_text())


@pytest.mark.parametrize("model", ["t5", "falcon"])
def test_texts_of_each_epoch_are_those_of_one_process(tmp_path, model):
    alone = _texts(tmp_path / "alone", model, "alone")
    assert len(alone) == 2
    for strategy in ("pipeline", "tensor"):
        epochs = _texts(tmp_path / strategy, model, strategy)
        for here, there in zip(epochs, alone, strict=True):
            assert (here["greedy"], here["sampled"]) == (there["greedy"], there["sampled"])
            assert here["loss"] == pytest.approx(there["loss"], abs=1e-4)
