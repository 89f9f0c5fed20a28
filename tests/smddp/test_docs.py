"""``docs/smddp.md`` does what it says: its code, block by block, as a reader would copy it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from support.platform.cloud import Cloud, service
from support.platform.stock_images import fix_day

from smp_estimator.cloud import image_table, images

DOCS = Path(__file__).parents[2] / "docs" / "smddp.md"
SCRIPT, HERE, CLOUD = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's script, in which its other blocks are run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def run(block: str, folder: Path) -> dict[str, Any]:
    (folder / "job.py").write_text(block)
    return runpy.run_path(str(folder / "job.py"))


@pytest.mark.full
@pytest.mark.job
def test_the_job_on_this_machine(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    estimator = run(HERE, folder)["estimator"]
    assert estimator.latest_training_job.describe()["TrainingJobStatus"] == "Completed"
    said = capfd.readouterr().out
    gradients = dict(re.findall(r"rank (\d) of 4 (tensor.*)", said))
    assert sorted(gradients) == ["0", "1", "2", "3"]
    assert len(set(gradients.values())) == 1, "averaged over all ranks"


def test_the_job_on_this_machine_is_accepted(folder: Path) -> None:
    compile(SCRIPT, "train.py", "exec")
    run(HERE.replace("estimator.fit()", "estimator.hyperparameters()"), folder)


def test_the_job_in_the_cloud(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    fix_day(monkeypatch)
    with service() as boto:
        cloud = Cloud(boto)
        monkeypatch.setattr("sagemaker.estimator.Session", lambda **_: cloud.session)
        # The log of a job that nobody runs would not end.
        run(CLOUD.replace("fit()", "fit(wait=False)"), folder)
        image = cloud.requests[-1]["AlgorithmSpecification"]["TrainingImage"]
        assert images.is_stock(image)
        row = image_table.row_of(image)
        assert row is None or not row.smddp, "it has no data parallel library of its own"
        assert cloud.carried()["sagemaker_program"] == "_smp_entry.py"
        assert cloud.carried()["sagemaker_mpi_enabled"] is True
