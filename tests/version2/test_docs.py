"""The script and the notebook of ``docs/version-2.md`` run, on processes of this machine, and so do the example and its script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.documents.doc_runs import matching
from support.training.version2_script import SCRIPT

PAGE = "version-2.md"
ROOT = Path(__file__).parents[2]


@pytest.mark.job
@pytest.mark.timeout(180)
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = matching((PAGE, "tsm.init()"), "python")
    (notebook,) = matching((PAGE, "SMPEstimator("), "python")
    (tmp_path / "train.py").write_text(script.code)
    monkeypatch.chdir(tmp_path)
    exec(compile(notebook.code, "notebook", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert all(f"rank {rank}: " in said for rank in range(2)), said


@pytest.mark.job
@pytest.mark.timeout(180)
def test_smp_launch_takes_its_parameters(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + "import os\nprint('local rank', os.environ['LOCAL_RANK'])\n")
    command = [sys.executable, "-m", "smp_launch", "run", "--processes", "2", "--parameters"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, '{"hybrid_shard_degree": 2}', "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("step 1 of 2 ranks, sharded over 2") == 2
    assert {"local rank 0", "local rank 1"} <= {line.rpartition("] ")[2] for line in done.stdout.splitlines()}
    wrong = subprocess.run(
        [*command, '{"hybrid_shard_degree": 4}', "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert wrong.returncode == 2
    assert "hybrid_shard_degree is 4, and the job has 2 processes" in wrong.stdout + wrong.stderr


def _run(*words: object, cwd: Path) -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SM_MODEL_DIR": str(cwd),
        "SMP_CHECKPOINT_DIR": str(cwd / "saved"),
    }
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.job
@pytest.mark.timeout(300)
def test_the_example_trains_and_resumes(tmp_path: Path) -> None:
    said = _run(ROOT / "examples" / "version2.py", "--steps", 4, cwd=tmp_path)
    assert "trained from step 0 to 4" in said
    assert "trained from step 4 to 8" in said
    assert Path(said.strip().splitlines()[-1].removeprefix("model: file://")).is_file(), said
    saved = {path.parent.name for path in (tmp_path / "version2" / "checkpoints").rglob("tp2-0")}
    assert {"step-4", "step-8"} <= saved  # and an older one, if the next was not whole when it was begun


@pytest.mark.job
@pytest.mark.timeout(300)
def test_the_examples_script_needs_no_estimator(tmp_path: Path) -> None:
    """Started by torchrun it goes on at another degree of sharding."""
    script, start = ROOT / "entrypoints" / "train_version2.py", ["-m", "torch.distributed.run", "--standalone"]
    for processes, begun, steps in ((2, 0, 2), (1, 2, 4)):
        words = ("--nproc-per-node", processes, script, "--steps", steps, "--save_every", 2, "--batch_size", 4)
        assert f"trained from step {begun} to {steps}" in _run(*start, *words, cwd=tmp_path)
    assert torch.load(tmp_path / "model.pt")["head.weight"].shape == (32, 64)
