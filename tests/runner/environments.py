"""The environments of the tests, and the tests that belong to each; the Makefile's targets take their selections from here."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Names the Docker image; tests that need one read the same variable.
IMAGE_VARIABLE = "SMP_TEST_IMAGE"

#: Files whose tests touch Transformers most: with its version 5 too.
WITH_5 = (
    "tests/tensor_parallel/test_huggingface.py",
    "tests/tensor_parallel/test_kept_weights.py",
    "tests/tensor_parallel/test_replaced_settings.py",
    "tests/pipeline/test_transformers.py",
    "tests/activations/test_transformers.py",
    "tests/checkpoints/test_transformers_format.py",
    "tests/checkpoints/test_save_pretrained.py",
    "tests/planning/test_model_config.py",
)
#: Files that touch the SDK most: the sample with the oldest SDK.
TOUCHING_THE_SDK = (
    "tests/estimator/test_cloud.py",
    "tests/estimator/test_cloud_requests.py",
    "tests/estimator/test_huggingface.py",
    "tests/estimator/test_images.py",
    "tests/estimator/test_passthrough.py",
    "tests/estimator/test_process_session.py",
    "tests/estimator/test_sdk_found.py",
)


@dataclass(frozen=True)
class Selection:
    """The tests of one call of pytest."""

    #: Files and folders, relative to the repository.
    paths: tuple[str, ...]
    #: The expression of ``-m``.
    marks: str = ""
    #: The expression of ``-k``.
    keyword: str = ""
    #: Paths that are left out.
    ignored: tuple[str, ...] = ()
    #: Seconds per test; 0 leaves what ``setup.cfg`` says.
    timeout: int = 0
    #: False for tests that must not run beside each other, such as those of Docker.
    is_parallel: bool = True

    def files(self, root: Path = ROOT) -> list[str]:
        """Return the test files, relative to ``root``, sorted."""
        found: set[Path] = set()
        for path in self.paths:
            place = root / path
            found.update(place.rglob("test_*.py") if place.is_dir() else [place])
        names = {file.relative_to(root).as_posix() for file in found}
        return sorted(name for name in names if not name.startswith(tuple(f"{path}/" for path in self.ignored)))

    def options(self) -> list[str]:
        """Return the options of pytest, without the paths."""
        options = [f"--ignore={path}" for path in self.ignored]
        if self.marks:
            options += ["-m", self.marks]
        if self.keyword:
            options += ["-k", self.keyword]
        if self.timeout:
            options += ["--timeout", str(self.timeout)]
        return options


@dataclass(frozen=True)
class Environment:
    """A Python with its packages, and its tests."""

    name: str
    #: The Python, relative to the repository or absolute.
    python: str
    #: The make target that builds it; empty if nothing has to be built.
    target: str
    #: All tests.
    selections: tuple[Selection, ...]
    #: The tests of the short targets of the Makefile, such as ``make test``.
    sample: tuple[Selection, ...] = ()
    #: By variable, the Python of another environment that tests start. The variable is left out if that is not built.
    other_pythons: tuple[tuple[str, str], ...] = ()
    needs_image: bool = False

    def program(self, root: Path = ROOT) -> str:
        """Return the path of its Python."""
        return str(root / self.python)

    def variables(self, root: Path = ROOT) -> dict[str, str]:
        """Return the variables of its tests: those of this process, and what it needs beside them."""
        environ = dict(os.environ)
        if not self.needs_image:
            # The tests of Docker belong to another environment; here they are skipped.
            environ.pop(IMAGE_VARIABLE, None)
        others = {name: root / python for name, python in self.other_pythons}
        return environ | {name: str(python) for name, python in others.items() if python.exists()}

    def why_missing(self, root: Path = ROOT, *, build: bool = False) -> str:
        """Return why its tests cannot run here, or an empty string if they can.

        Args:
            build: whether make builds what is not there; what it fetches may be several GB.
        """
        if self.target and _make("-q", self.target, root).returncode:
            if not build:
                return f"not built: make {self.target}"
            built = _make("-s", self.target, root)
            if built.returncode:
                return f"make {self.target} fails: {_last_error(built.stderr)}"
        if not Path(self.program(root)).exists():
            return f"there is no {self.python}"
        return _why_no_image(root, build=build) if self.needs_image else ""


ENVIRONMENTS = (
    Environment(
        "newest",
        ".venv/bin/python",
        ".venv/.installed",
        selections=(Selection(("tests",)),),
        # The sample of tests/clients runs in `make test-clients`, with both versions of Transformers.
        sample=(Selection(("tests",), marks="not full", ignored=("tests/clients",)),),
    ),
    Environment(
        "sdk-floor",
        ".venv-sdk-floor/bin/python",
        ".venv-sdk-floor/.installed",
        # It has neither PyTorch nor Open MPI, which jobs need.
        selections=(Selection(("tests/estimator",), marks="not job and not full"),),
        sample=(Selection(TOUCHING_THE_SDK, marks="not job and not full"),),
    ),
    Environment(
        "sdk-3",
        ".venv-sdk-3/bin/python",
        ".venv-sdk-3/.installed",
        selections=(Selection(("tests/model_trainer", "tests/migration")),),
        sample=(Selection(("tests/model_trainer", "tests/migration"), marks="not full"),),
        # With version 2 of the SDK, whose losses are compared.
        other_pythons=(("SMP_TEST_SDK_PYTHONS", ".venv/bin/python"),),
    ),
    Environment(
        "clients-4",
        ".venv-clients-4/bin/python",
        ".venv-clients-4/.installed",
        selections=(Selection(("tests/clients",)),),
        sample=(Selection(("tests/clients",), marks="not full"),),
    ),
    Environment(
        "clients-5",
        ".venv-clients-5/bin/python",
        ".venv-clients-5/.installed",
        selections=(
            Selection(("tests/clients",)),
            Selection(WITH_5, marks="not full"),
            Selection(("tests/docs/test_pages_run.py",), keyword="lora.md", timeout=600, is_parallel=False),
        ),
        sample=(
            Selection(("tests/clients", *WITH_5), marks="not full"),
            Selection(("tests/docs/test_pages_run.py",), keyword="lora.md", timeout=600, is_parallel=False),
        ),
    ),
    Environment(
        "trackers",
        ".venv-trackers/bin/python",
        ".venv-trackers/.installed",
        selections=(Selection(("tests/trackers", "tests/tracking"), is_parallel=False),),
    ),
    Environment(
        "docker",
        ".venv/bin/python",
        ".venv/.installed",
        selections=(Selection(("tests/docker",), is_parallel=False),),
        needs_image=True,
    ),
    Environment(
        "docker-sdk-3",
        ".venv-sdk-3/bin/python",
        ".venv-sdk-3/.installed",
        selections=(Selection(("tests/docker/test_model_trainer.py",), is_parallel=False),),
        needs_image=True,
    ),
)


def find(name: str) -> Environment:
    """Return the environment of this name.

    Raises:
        ValueError: there is none.
    """
    for environment in ENVIRONMENTS:
        if environment.name == name:
            return environment
    raise ValueError(f"no environment {name!r}: {', '.join(environment.name for environment in ENVIRONMENTS)}")


def _make(option: str, target: str, root: Path) -> subprocess.CompletedProcess[str]:
    # Make hands its own options and jobs to the makes below it, where -n or -j of the caller would act again.
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(
        ["make", option, target], cwd=root, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def _why_no_image(root: Path, *, build: bool) -> str:
    image = os.environ.get(IMAGE_VARIABLE)
    if not image:
        return f"{IMAGE_VARIABLE} names no image"
    try:
        daemon = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no Docker: {error}"
    if daemon.returncode:
        return f"no Docker daemon answers: {_last_error(daemon.stderr)}"
    if subprocess.run(["docker", "image", "inspect", image], capture_output=True).returncode == 0:
        return ""
    if not build:
        return f"there is no image {image}: make image"
    built = _make("-s", "image", root)
    return f"make image fails: {_last_error(built.stderr)}" if built.returncode else ""


def _last_error(said: str) -> str:
    """Return the last line that is not make's own word on it."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith("make")]
    return lines[-1][:300] if lines else "it gives no reason"
