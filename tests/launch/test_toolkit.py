"""What the training toolkit is asked to do with the user's code, in an image of this project."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from smp_launch.sagemaker import toolkit


@pytest.fixture
def asked(monkeypatch):
    """What a toolkit is asked for, instead of doing it."""
    found = []

    def note(name):
        return lambda *args, **_: found.append((name, *args))

    modules = SimpleNamespace(install=note("install"), install_requirements=note("install_requirements"))
    files = SimpleNamespace(download_and_extract=note("download"))
    logging_config = SimpleNamespace(configure_logger=lambda level: None)
    made = SimpleNamespace(files=files, logging_config=logging_config, modules=modules)
    monkeypatch.setitem(sys.modules, "sagemaker_training", made)
    return found


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ([], []),
        (["requirements.txt"], ["install_requirements"]),
        (["setup.py"], ["install"]),
        (["setup.py", "requirements.txt"], ["install"]),
    ],
)
def test_code_that_is_a_package_is_installed(asked, tmp_path, names, wanted):
    for name in names:
        (tmp_path / name).write_text("")
    with open(os.devnull, "wb") as report:
        assert toolkit.run_child([str(report.fileno()), str(tmp_path)]) == 0
    assert asked == [(name, str(tmp_path)) for name in wanted]


def test_code_without_either_needs_no_toolkit(tmp_path, monkeypatch):
    monkeypatch.setattr(toolkit, "_run", lambda *_: pytest.fail("it was started"))
    training = SimpleNamespace(tree=SimpleNamespace(code_dir=tmp_path), hyperparameters={}, current_host="algo-1")
    toolkit.prepare_code(training, None, {})
    (tmp_path / "setup.py").write_text("")
    monkeypatch.setattr(toolkit, "_run", lambda *_: ("requirements", "no such package"))
    with pytest.raises(
        toolkit.LaunchError, match=r"setup\.py cannot be installed: no such package; pip ran on host 'algo-1'"
    ):
        toolkit.prepare_code(training, None, {})
