"""The script and the notebook of ``docs/version-2.md`` run, on processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.documents.doc_runs import matching
from support.training.version2_script import SCRIPT

PAGE = "version-2.md"


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
