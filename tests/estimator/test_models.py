"""``smp-estimator models``, and the document of the same table."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from smp_estimator.cli.main import main
from smp_estimator.models.outcomes import format_cell, parse_matrix

DATA = {
    "versions": {"4": {"transformers": "4.57.6"}, "5": {"transformers": "5.23.0"}},
    "families": [
        [
            "causal",
            "llama",
            {"4": {"pp 2": {"is_equal": True}, "tp 2": {"is_equal": True, "split": 0.43, "traffic": 1.0}}},
        ],
        ["causal", "odd", {"4": {"pp 2": {"is_equal": False, "reason": "it is odd"}}}],
        ["masked", "none", {"4": {"one process": {"is_equal": False, "reason": "it wants pictures"}}}],
    ],
}


def _said(*arguments):
    result = CliRunner().invoke(main, ["models", *arguments])
    return result.exit_code, result.output


def test_the_matrix_is_read():
    matrix = parse_matrix(DATA)
    assert [family.model_type for family in matrix.matching(["LLA"])] == ["llama"]
    assert [family.model_type for family in matrix.matching(["causal"])] == ["llama", "odd"]
    assert next(matrix.counts("4")) == ("pp 2", 1, 2)
    assert [(good, count) for _, good, count in matrix.split_well("4")] == [(1, 1), (1, 1)]
    assert [family.trains_alone("4") for family in matrix.families] == [True, True, False]
    assert [format_cell(matrix.families[0].majors["4"].get(mode)) for mode in ("pp 2", "sdp 2", "tp 2")] == [
        "equal",
        "–",
        "equal 0.43 / 1.00",
    ]


def test_a_part_is_shown(monkeypatch):
    monkeypatch.setattr("smp_estimator.cli.commands.models.read_matrix", lambda: parse_matrix(DATA))
    status, text = _said("llama", "--transformers", "4")
    assert status == 0
    assert "equal 0.43 / 1.00" in text
    assert "odd" not in text
    status, text = _said("--not-equal", "--transformers", "4")
    assert "it is odd" in text
    assert "it wants pictures" in text
    assert "llama" not in text


def test_all_is_shown_with_the_numbers():
    status, text = _said()
    assert status == 0
    assert "equal to one process, of those that it trains: pp 2" in text
    assert "at tp 2, a rank is spared 0.4 of the matrices or more: " in text


def test_an_unknown_family_is_an_error():
    status, text = _said("no-such-family")
    assert status == 1
    assert "has no-such-family in its name" in text


def test_the_document_is_that_of_the_outcomes():
    model_table = pytest.importorskip("model_table")
    text = model_table.DOCUMENT.read_text()
    assert model_table.BEGIN + model_table.tables() + model_table.END in text, "python benchmarks/models.py write"


def test_a_run_is_taken_over(tmp_path, monkeypatch):
    import model_table

    outcomes, document, run = (tmp_path / name for name in ("outcomes.json", "models.md", "run.jsonl"))
    monkeypatch.setattr(model_table, "OUTCOMES", outcomes)
    monkeypatch.setattr(model_table, "DOCUMENT", document)
    document.write_text(f"before\n{model_table.BEGIN}old\n{model_table.END}after\n")
    of = {"kind": "causal", "family": "llama", "versions": {"transformers": "4.57.6", "torch": "2.13.0"}}
    differs = {"ok": False, "loss": 0.5, "gradient": 0.25, "where": "head.weight"}
    records = [
        {**of, "mode": "one process", "ok": True},
        {**of, "mode": "pp 2", "ok": True},
        {**of, "mode": "tp 2", **differs},
    ]
    run.write_text("".join(json.dumps(record) + "\n" for record in records))
    model_table.write_table([run])
    assert parse_matrix(json.loads(outcomes.read_text())).families[0].majors["4"].keys() == {"pp 2", "tp 2"}
    text = document.read_text()
    assert "| llama | causal | equal | – | no | – |" in text
    assert "- llama (causal), tp 2: the loss differs by 0.5, the gradient of head.weight by 0.2" in text
    assert "old" not in text
