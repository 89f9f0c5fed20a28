"""Whole jobs of a trainer, with ranks: the example, a cell that ``migrate`` has changed, a stop and a failure."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from support.platform.jobs import ENTRYPOINTS, TINY, some_text
from support.platform.sdk3 import here, require_sdk_3

require_sdk_3()

from sagemaker.core.training.configs import CheckpointConfig  # noqa: E402 - only where it is installed
from sagemaker.core.utils.exceptions import FailedStatusError  # noqa: E402

from smp_estimator.migration import migrate_sources  # noqa: E402

pytestmark = [pytest.mark.job, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2]

#: Pythons with version 2 of the SDK, which run the cell as it was written; separated by colons.
OTHERS_VARIABLE = "SMP_TEST_SDK_PYTHONS"

CELL = """
from smp_estimator import SMPEstimator

estimator = SMPEstimator(
    entry_point="train_gpt.py",
    source_dir={entrypoints!r},
    instance_type="local",
    instance_count=2,
    output_path={output!r},
    hyperparameters={hyperparameters!r},
    environment={{"OMP_NUM_THREADS": "1"}},
    distribution={{
        "smdistributed": {{
            "modelparallel": {{
                "enabled": True,
                "parameters": {{"partitions": 2, "microbatches": 2, "ddp": True, "placement_strategy": "spread"}},
            }}
        }},
        "mpi": {{"enabled": True, "processes_per_host": 2}},
    }},
)
estimator.fit({{"train": {text!r}}})
print("model:", estimator.model_data)
"""


def cell(folder: Path) -> str:
    text = some_text(folder)
    return CELL.format(
        entrypoints=str(ENTRYPOINTS), output=f"file://{folder / 'out'}", hyperparameters=TINY, text=f"file://{text}"
    )


def losses(python: str, code: str, folder: Path) -> list[float]:
    """Run a cell with the Python of some environment; gives what the script logged of every step."""
    packages = f"{REPOSITORY}:{REPOSITORY / 'container'}"
    environ = {**os.environ, "PYTHONPATH": packages, "SAGEMAKER_SUPPRESS_V2_WARNING": "1"}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environ, timeout=240, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    model = re.search(r"^model: file://(\S+)$", done.stdout, re.MULTILINE)
    assert model, done.stdout
    with tarfile.open(model[1]) as archive:
        return json.load(archive.extractfile("losses.json"))  # type: ignore[arg-type]


def test_a_cell_that_migrate_has_changed(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("new", "old")]
    for folder in folders:
        folder.mkdir()
    (after,), _ = migrate_sources([cell(folders[0])], tmp_path)
    assert "SMPEstimator" not in after
    found = losses(sys.executable, after, folders[0])
    assert len(found) == TINY["steps"]
    assert found[-1] < found[0]
    others = [python for python in os.environ.get(OTHERS_VARIABLE, "").split(":") if python]
    for number, python in enumerate(others):
        folder = folders[1] / str(number)
        folder.mkdir()
        assert losses(python, cell(folder), folder) == pytest.approx(found, abs=1e-6), python
    if not others:
        pytest.skip(
            f"{OTHERS_VARIABLE} names no Python with version 2 of the SDK, so the losses are compared with none"
        )


def test_the_example(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples/model_trainer.py"), "--steps", "4", "--megabytes", "0.2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r"model_trainer: steps=4 val_loss=\d+\.\d+ model=\S+/quickstart-output/model\.tar\.gz", last), (
        last
    )


@pytest.mark.parametrize(
    ("page", "script", "degree"),
    [("docs/sdk-v3.md", "scripts/train.py", 2), ("README.md", "entrypoints/train_gpt.py", 1)],
)
def test_a_page_s_example(page: str, script: str, degree: int, tmp_path: Path) -> None:
    """What a page shows of ModelTrainer, with a script and data that exist."""
    text = (REPOSITORY / page).read_text()
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "trainer.train(" in code]
    (tmp_path / script).parent.mkdir()
    (tmp_path / script).write_text(
        f"import os\nimport smdistributed.modelparallel.torch as smp\nsmp.init()\nassert smp.pp_size() == {degree}\n"
        "if smp.rank() == 0: open(os.path.join(os.environ['SM_MODEL_DIR'], 'm'), 'w').close()\n"
    )
    (tmp_path / "data" / "train").mkdir(parents=True)
    here = code.replace("/path/to/text", str(tmp_path / "data"))
    done = subprocess.run([sys.executable, "-c", here], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "model.tar.gz" in done.stdout.splitlines()[-1]


STOPPED = """
import os, signal, sys, time
folder = os.environ["SMP_CHECKPOINT_DIR"]
def save(*_):
    open(os.path.join(folder, "saved-" + os.environ["SMP_RANK"]), "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(os.path.join(folder, "ready-" + os.environ["SMP_RANK"]), "w").close()
while True:
    time.sleep(0.05)
"""


def test_a_stop_reaches_every_rank(script: Path, tmp_path: Path) -> None:
    (script / "train.py").write_text(STOPPED)
    kept = tmp_path / "kept"
    trainer = here(
        script,
        compute={"instance_type": "local", "instance_count": 2},
        checkpoint_config=CheckpointConfig(s3_uri=f"file://{kept}"),
        local_container_root=str(tmp_path / "jobs"),
    )
    trainer.train(wait=False)
    deadline = time.monotonic() + 60
    while len(list(kept.glob("ready-*"))) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    trainer.latest_training_job.stop()
    trainer.latest_training_job.wait()
    assert trainer.latest_training_job.training_job_status == "Stopped"
    assert len(list(kept.glob("saved-*"))) == 4


def test_a_failing_rank_is_what_train_raises(script: Path, tmp_path: Path) -> None:
    (script / "train.py").write_text(
        textwrap.dedent("""
            import os
            import smdistributed.modelparallel.torch as smp
            smp.init()
            if smp.rank() == 1:
                raise ValueError("the rank that fails on purpose")
            smp.barrier()
        """)
    )
    trainer: Any = here(script, local_container_root=str(tmp_path / "jobs"))
    with pytest.raises(FailedStatusError, match=r"rank 1 \(algo-1\): ValueError: the rank that fails on purpose"):
        trainer.train(logs=False)
