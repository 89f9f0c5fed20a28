"""The checks for a machine with a GPU: their catalog, their command line, and one of them on the CPU."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_check import catalog, environment, results
from support.documents.doc_blocks import ROOT

if TYPE_CHECKING:
    import pytest

PACKAGE = ROOT / "benchmarks" / "gpu_check"


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PACKAGE), *words], capture_output=True, text=True, cwd=ROOT)


def functions_of(module: str) -> set[str]:
    tree = ast.parse((PACKAGE / "checks" / f"{module}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_check_is_in_the_catalog_and_can_be_found() -> None:
    for check in catalog.CHECKS:
        assert f"check_{check.name}" in functions_of(check.module), check.name
    modules = [path.stem for path in (PACKAGE / "checks").glob("*.py")]
    written = [name for module in modules for name in functions_of(module) if name.startswith("check_")]
    assert sorted(written) == sorted(f"check_{check.name}" for check in catalog.CHECKS)
    assert len(catalog.BY_NAME) == len(catalog.CHECKS)


def test_every_check_has_a_part_and_a_limit() -> None:
    parts = [check.part for check in catalog.CHECKS]
    assert parts == sorted(parts), "part a runs before part b"
    assert set(parts) == {"a", "b"}
    for check in catalog.CHECKS:
        assert 30 <= check.seconds <= 240, check.name
        assert check.question


def test_the_list_needs_nothing_but_the_standard_library() -> None:
    words = ["-I", "-S", str(PACKAGE), "list"]  # without the packages of this environment
    listed = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in listed] == [check.name for check in catalog.CHECKS]


def test_a_check_without_time_is_named_and_the_command_fails(tmp_path: Path) -> None:
    done = run_command("drive", "--only", "env,hf", "--part", "b", "--budget", "1", "--out", str(tmp_path))
    assert done.returncode == 1
    found = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert found == [{"check": "hf", "ok": None, "skipped": "no time left"}]
    assert done.stdout.splitlines()[-1].split() == ["hf", "0.0", "s", "skipped"]


def test_an_unknown_check_is_refused() -> None:
    done = run_command("drive", "--skip", "env,typo")
    assert done.returncode == 2
    assert "no check is called typo" in done.stderr


def test_predictions_have_what_the_check_reads() -> None:
    for given in json.loads((PACKAGE / "predictions.json").read_text()).values():
        assert {"config", "shape", "batch", "mode", "checkpointed", "plan_gib", "rehearsal_gib"} <= given.keys()


def test_an_error_in_a_case_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    with results.case("one") as finding:
        finding["figure"] = 3
        raise ValueError("planted")
    lines = capsys.readouterr().out.splitlines()
    found = [finding for line in lines if (finding := results.parse(line))]
    assert found == [{"case": "one", "figure": 3, "ok": False, "error": "ValueError: planted"}]


def run_check() -> str:
    from gpu_check import environment

    environment.extend_path()
    from gpu_check.checks import client_models

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        client_models.check_attention()
    return printed.getvalue()


def test_a_tiny_check_runs_on_the_cpu(ranks: Callable[..., list[Any]]) -> None:
    (printed,) = ranks(run_check, 1, init=False, env={"SMPCHECK_TINY": "1"})
    found = [finding for line in printed.splitlines() if (finding := results.parse(line))]
    assert [(finding["ok"], finding["case"].partition(":")[0]) for finding in found] == [
        (True, "smp.nn.DistributedTransformer")
    ] * 5
    assert all(finding["ms"] > 0 for finding in found)


def test_the_package_is_where_it_says() -> None:
    assert environment.PACKAGE == PACKAGE
    assert environment.ROOT == ROOT
    assert all(Path(path).is_dir() for path in environment.PATHS)
