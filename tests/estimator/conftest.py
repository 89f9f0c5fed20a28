"""Estimators and sessions whose jobs run the fake bootstrap: everything but mpirun and torch is real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.platform.fake_jobs import FAKE_BOOTSTRAP, forget_account, source_folder
from support.platform.stock_images import fix_day


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials, region or configuration of whoever runs the tests."""
    forget_account(monkeypatch, tmp_path / "home")


@pytest.fixture(autouse=True)
def _day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches of images have ended or not, whenever the tests run."""
    fix_day(monkeypatch)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A source directory with ``train.py`` and a module beside it."""
    return source_folder(tmp_path)


@pytest.fixture
def session(tmp_path: Path) -> Any:
    from smp_estimator import ProcessSession

    return ProcessSession(root=tmp_path / "jobs", launcher=FAKE_BOOTSTRAP)


@pytest.fixture
def make(script: Path, session: Any) -> Callable[..., Any]:
    """``make(play="fail", hyperparameters=…, **estimator_arguments)`` → an estimator of a fake job."""
    from smp_estimator import SMPEstimator

    def build(play: str = "train", *, hyperparameters: dict[str, Any] | None = None, **arguments: Any) -> Any:
        given = {
            "entry_point": "train.py",
            "source_dir": str(script),
            "instance_type": "local",
            "sagemaker_session": session,
            **arguments,
        }
        return SMPEstimator(hyperparameters={"play": play, **(hyperparameters or {})}, **given)

    return build


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that travels."""
    from smp_estimator.cloud import source

    return source.build_wheel(tmp_path_factory.mktemp("wheel"))
