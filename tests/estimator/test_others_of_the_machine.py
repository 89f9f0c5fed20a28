"""What other users of a machine see of a job, and what they could put in its way."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.platform.fake_jobs import FAKE_BOOTSTRAP

from smp_estimator import ProcessSession
from smp_estimator.cloud import entry

Make = Callable[..., Any]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_jobs_folder_is_for_its_user_alone(make: Make, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make(sagemaker_session=ProcessSession(root=tmp_path / "all" / "jobs", keep=True, launcher=FAKE_BOOTSTRAP)).fit(
            logs=False
        )
    finally:
        os.umask(before)
    (job,) = (tmp_path / "all" / "jobs").iterdir()
    assert mode(job) == 0o700
    assert mode(job / "job.log") == 0o600
    assert {mode(path) for path in (job / "algo-1/opt/ml/input/config").iterdir()} == {0o600}


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel, and a folder for temporary files of its own."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with zipfile.ZipFile(tmp_path / "smp.whl", "w") as archive:
        archive.writestr("smp_config/__init__.py", "right = True")
    return tmp_path / "smp.whl"


def test_the_runtime_is_unpacked_once(wheel: Path, tmp_path: Path) -> None:
    site = entry.unpack_wheel(str(wheel))
    assert entry.unpack_wheel(str(wheel)) == site
    assert [path.name for path in (tmp_path / "temporary").iterdir()] == [os.path.basename(site)]
    assert mode(Path(site)) == 0o700


def _somebody_elses(site: Path) -> None:
    os.chown(site, 4242, 4242)


def _writable_for_all(site: Path) -> None:
    site.chmod(0o777)


def _a_link(site: Path) -> None:
    site.rename(site.with_name("elsewhere"))
    site.symlink_to(site.with_name("elsewhere"))


@pytest.mark.parametrize("foreign", [_somebody_elses, _writable_for_all, _a_link])
def test_a_folder_that_others_can_write_to_is_not_trusted(wheel: Path, foreign: Callable[[Path], None]) -> None:
    site = Path(entry.unpack_wheel(str(wheel)))
    module = site / "smp_config" / "__init__.py"
    module.write_text("right = False")
    try:
        foreign(site)
    except PermissionError:
        pytest.skip("only root can make a folder somebody else's")
    found = Path(entry.unpack_wheel(str(wheel)))
    assert found != site
    assert (found / "smp_config" / "__init__.py").read_text() == "right = True"
    assert mode(found) == 0o700
    assert found.stat().st_uid == os.getuid()
