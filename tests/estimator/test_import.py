"""The package stays light until its names are used."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

import smp_estimator


def _python(code: str) -> str:
    # Tests of this process may have set defaults of the SDK, which it would tell of.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SAGEMAKER_")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    return done.stdout.strip()


def test_import_loads_neither_sdk_nor_torch() -> None:
    heavy = _python(
        "import sys, smp_estimator, smp_estimator.local;"
        "print([m for m in ('sagemaker', 'boto3', 'torch', 'pydantic', 'rich') if m in sys.modules])"
    )
    assert heavy == "[]"


def test_estimator_never_loads_torch_or_the_runtime() -> None:
    loaded = _python(
        "import sys; from smp_estimator import SMPEstimator;"
        "print([m for m in ('torch', 'smp_runtime', 'smdistributed') if m in sys.modules])"
    )
    assert loaded == "[]", "nor does it print anything"


def test_what_the_sdk_says_of_its_defaults_is_kept_for_who_has_set_up_its_logging(monkeypatch) -> None:
    from smp_estimator.sdk.version_2 import without_absent_defaults

    logger, level = logging.getLogger("sagemaker.config"), logging.INFO
    monkeypatch.setattr(logger, "handlers", [])
    absent, found = (
        logging.LogRecord("sagemaker.config", level, "", 0, f"{what} from location: %s", ("/etc/x",), None)
        for what in ("Not applying SDK defaults", "Fetched defaults config")
    )
    shown = []
    for level_of_the_user in (logging.NOTSET, logging.INFO):
        monkeypatch.setattr(logger, "level", level_of_the_user)
        with without_absent_defaults():
            shown.append([bool(logger.filter(record)) for record in (absent, found)])
        assert logger.filter(absent)
    assert shown == [[False, True], [True, True]]


def test_import_loads_nothing_that_takes_long() -> None:
    """The SDK alone takes seconds; what needs it comes with the first use of a name."""
    loaded = _python(
        "import sys, smp_estimator;"
        "print([m for m in ('sagemaker', 'boto3', 'botocore', 'pydantic', 'rich', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    assert loaded.splitlines()[-1] == "[]"


def test_public_surface_is_frozen() -> None:
    names = ["MPI", "ConfigError", "ModelParallel", "ProcessSession", "SMPEstimator", "SMPHuggingFace", "__version__"]
    assert smp_estimator.__all__ == names
    for name in smp_estimator.__all__:
        assert getattr(smp_estimator, name)
    with pytest.raises(AttributeError, match="Estimater"):
        _ = smp_estimator.Estimater
