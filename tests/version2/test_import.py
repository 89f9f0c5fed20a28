"""``import torch.sagemaker`` finds version 2 however these packages are installed, and costs a Python start nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "container"
PATH_FILE = "smp_estimator_torch_sagemaker.pth"

#: A package ``torch`` that imports in no time; finders do not care.
STAND_IN = "import sys; torch = type(sys)('torch'); torch.__path__ = []; sys.modules['torch'] = torch; "

FIND = "import importlib.util as u; print(u.find_spec('torch.sagemaker').origin)"


def python(code: str, *options: str, path: object = CONTAINER, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code with the packages on ``PYTHONPATH`` alone, without those that the environment has installed."""
    dependencies = [entry for entry in sys.path if entry.endswith("site-packages")]
    # -S: no path files, but sitecustomize has to be imported then as site does it.
    start = f"import sys; sys.path += {dependencies!r}; import sitecustomize; " if options == ("-S",) else ""
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": str(path), **environment}
    command = [sys.executable, *options, "-c", start + code]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=120, check=True)


def test_it_is_found_from_the_path_of_packages() -> None:
    found = python(STAND_IN + FIND, "-S").stdout.strip()
    assert found == str(CONTAINER / "torch_sagemaker" / "__init__.py")


def test_the_sitecustomize_that_it_hides_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one')")
    said = python(STAND_IN + FIND, "-S", path=f"{CONTAINER}{os.pathsep}{tmp_path}").stdout
    assert said.splitlines() == ["the other one", str(CONTAINER / "torch_sagemaker" / "__init__.py")]


def test_a_path_file_makes_it_found(tmp_path: Path) -> None:
    """As in site-packages: the packages, the finder, and the file that Python reads there."""
    for name in ("torch_sagemaker", "torch_sagemaker_finder.py", PATH_FILE):
        (tmp_path / name).symlink_to(CONTAINER / name)
    code = f"import site; site.addsitedir({str(tmp_path)!r}); " + STAND_IN + FIND
    assert python(code, "-S", "-I").stdout.strip() == str(tmp_path / "torch_sagemaker" / "__init__.py")


@pytest.mark.parametrize("environment", [{}, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}], ids=["", "without entry points"])
def test_it_is_imported_after_torch(environment: dict[str, str]) -> None:
    code = "import torch; import torch.sagemaker as tsm; print(tsm.is_initialized(), tsm.state.tensor_parallel_degree)"
    assert python(code, "-S", **environment).stdout.split() == ["False", "1"]


def test_the_start_of_python_imports_neither_torch_nor_packages() -> None:
    said = python("pass", "-X", "importtime").stderr
    imported = {line.rpartition("|")[2].strip() for line in said.splitlines()}
    assert "torch_sagemaker_finder" in imported
    own = ("torch.", "smp_", "torch_sagemaker.", "pydantic")
    assert [name for name in imported if name == "torch" or name.startswith(own)] == []


def test_a_package_of_pytorch_s_own_wins(tmp_path: Path) -> None:
    (tmp_path / "sagemaker").mkdir()
    (tmp_path / "sagemaker" / "__init__.py").write_text("")
    code = STAND_IN + f"torch.__path__ = [{str(tmp_path)!r}]; " + FIND
    assert python(code, "-S").stdout.strip() == str(tmp_path / "sagemaker" / "__init__.py")


def test_what_setup_builds_has_the_path_file(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    words = ["-q", "egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path / "lib")]
    subprocess.run([sys.executable, "setup.py", *words], cwd=ROOT, check=True, capture_output=True, timeout=120)
    lib = tmp_path / "lib"
    assert (lib / PATH_FILE).read_text().strip() == "import torch_sagemaker_finder"
    assert {"torch_sagemaker_finder.py", "torch_sagemaker", "smp_version2"} <= {each.name for each in lib.iterdir()}
    assert not (lib / "sitecustomize.py").exists(), "it would be that of the whole environment"


def test_the_source_distribution_has_the_path_file() -> None:
    """Setuptools takes no such file by itself, and a wheel is built from the distribution."""
    lines = (ROOT / "MANIFEST.in").read_text().splitlines()
    assert f"include container/{PATH_FILE}" in lines
    assert (CONTAINER / PATH_FILE).is_file()
