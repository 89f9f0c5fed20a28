"""Trainers of SDK v3 for tests; no account, and no telemetry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.platform.fake_jobs import FAKE_BOOTSTRAP, forget_account, source_folder
from support.platform.sdk3 import here
from support.platform.stock_images import fix_day


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials, region or configuration of whoever runs the tests; nothing is reported to the SDK's makers."""
    forget_account(monkeypatch, tmp_path / "home")
    fix_day(monkeypatch)  # patches of images have ended or not, whenever the tests run
    config = tmp_path / "sdk.yaml"
    config.write_text("SchemaVersion: '1.0'\nSageMaker:\n  PythonSDK:\n    Modules:\n      TelemetryOptOut: true\n")
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(config))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A source directory with ``train.py`` and a module beside it."""
    return source_folder(tmp_path)


@pytest.fixture
def make(script: Path, tmp_path: Path) -> Callable[..., Any]:
    """``make(play="fail", hyperparameters=…, **arguments)`` → a trainer of a fake job on this machine."""

    def build(play: str = "train", *, hyperparameters: dict[str, Any] | None = None, **given: Any) -> Any:
        given.setdefault("local_container_root", str(tmp_path / "jobs"))
        # The fake bootstrap reads JSON, in which a text has quotation marks.
        made = here(script, hyperparameters={"play": f'"{play}"', **(hyperparameters or {})}, **given)
        made._launcher = FAKE_BOOTSTRAP
        return made

    return build


@pytest.fixture(scope="module")
def whole_cloud() -> Iterator[Any]:
    from support.platform.cloud import Cloud, service

    with service() as boto:
        yield Cloud(boto)


@pytest.fixture
def cloud(whole_cloud: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The service that moto plays, with the requests that this test sent."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    whole_cloud.requests.clear()
    return whole_cloud
