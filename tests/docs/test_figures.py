"""The runner of benchmarks: its file, its tables, and what it does when a benchmark fails."""

from __future__ import annotations

import json
import re
from pathlib import Path

import bench
import pytest
import results
from results import Column, Suite
from suites import SUITES

SUITE = Suite(
    "tiny",
    "Tiny",
    "tiny.py",
    ("--all",),
    ("--few",),
    (Column("case", "case"), Column("ratio", "{time_ratio:.2f}"), Column("never", "{missing:.1f}")),
    {"a": ("time_ratio", 0.9), "b": ("time_ratio", 0.9)},
)
LINES = [{"case": "a", "time_ratio": 0.5}, {"case": "b", "time_ratio": 1.25}, {"case": "c", "time_ratio": None}]


def suite_of(script: Path) -> Suite:
    return Suite("tiny", "Tiny", str(script), (), None, SUITE.columns, {})


def test_a_table_shows_what_lines_have_and_whether_aims_are_met() -> None:
    assert list(results.table(SUITE, LINES)) == [
        "| case | ratio | aim |",
        "|---|---|---|",
        "| a | 0.50 | ≤ 0.9: met |",
        "| b | 1.25 | ≤ 0.9: missed |",
        "| c | – | – |",
    ]


def test_lines_of_json_are_found_among_others() -> None:
    printed = 'torch 2\n{"case": "a"}\n{broken\n[smp] word\n  {"case": "indented"}\n'
    assert results.lines_of(printed) == [{"case": "a"}]


def test_a_block_of_the_page_is_replaced_and_the_rest_stays() -> None:
    machine = {"cores": 2, "processor": "P", "gpu": None, "torch": "2"}
    found = {"tiny": {"command": "python x", "date": "2026-01-02", "machine": machine, "load": 0.25, "lines": LINES}}
    page = f"before\n{results.begin('tiny')}old\n{results.END}after\n"
    new = results.filled(page, [SUITE], {"suites": found})
    assert new.startswith("before\n")
    assert new.endswith(f"\n{results.END}after\n")
    assert "old" not in new
    assert "`python x`, 2026-01-02, 2 × P, torch 2, load 0.2 before:" in new
    assert results.filled(new, [SUITE], {"suites": found}) == new
    with pytest.raises(
        SystemExit, match="lacks the line <!-- the following is written by benchmarks/bench.py: tiny -->"
    ):
        results.filled("a page without it\n", [SUITE], {"suites": found})


def test_the_page_shows_the_figures_of_the_file() -> None:
    page = bench.PAGE.read_text()
    found = results.read(bench.FILE)
    assert found["suites"], "no result is there: make bench"
    assert results.filled(page, SUITES, found) == page, "the page is older: python benchmarks/bench.py write"


def test_a_run_keeps_what_others_have_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, file = tmp_path / "tiny.py", tmp_path / "results.json"
    script.write_text("import json; print(json.dumps({'case': 'a', 'time_ratio': 0.5}))")
    file.write_text(json.dumps({"format": results.FORMAT_VERSION, "suites": {"other": {"lines": []}}}))
    assert bench.run([suite_of(script)], quick=False, file=file, seconds=60) == 0
    found = json.loads(file.read_text())["suites"]
    assert set(found) == {"other", "tiny"}
    assert found["tiny"]["lines"] == [{"case": "a", "time_ratio": 0.5}]
    assert found["tiny"]["machine"]["cores"] >= 1
    assert "| a | 0.50 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "seconds", "said"),
    [
        ("raise ValueError('seven')", 60, "failed after .* s: ValueError: seven"),
        ("import time; time.sleep(600)", 1, "failed after .* s: it had not ended after 1 s"),
        ("print('nothing')", 60, "failed after .* s: it printed no figures"),
    ],
    ids=["raises", "hangs", "silent"],
)
def test_a_failure_keeps_the_former_result(
    text: str, seconds: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    script, file = tmp_path / "tiny.py", tmp_path / "results.json"
    script.write_text(text)
    former = json.dumps({"format": results.FORMAT_VERSION, "suites": {"tiny": {"lines": LINES}}})
    file.write_text(former)
    assert bench.run([suite_of(script)], quick=False, file=file, seconds=seconds) == 1
    assert file.read_text() == former
    assert re.search(said, capsys.readouterr().out)


def test_a_quick_run_leaves_out_what_takes_long(tmp_path: Path) -> None:
    assert bench.run([suite_of(tmp_path / "not-there.py")], quick=True, file=tmp_path / "results.json", seconds=1) == 0
    assert not (tmp_path / "results.json").exists()


def test_ratios_are_drawn(tmp_path: Path) -> None:
    lines = [{"case": "a", "peer": "p", "time_ratio": 0.5, "ratio_quartiles": [0.4, 0.6]}, {"case": "only bytes"}]
    results.draw(tmp_path / "ratios.svg", [SUITE], {"suites": {"tiny": {"lines": lines}}})
    drawn = (tmp_path / "ratios.svg").read_text()
    assert "a ÷ p" in drawn
    assert "only bytes" not in drawn
    assert drawn.startswith("<svg"), "as a part of a page"
    assert "prefers-color-scheme:dark" in drawn
    assert not re.search("#1f2328(?!})", drawn), "ink follows the scheme"
