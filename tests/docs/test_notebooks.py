"""The notebooks of ``examples/``, run from the first cell to the last, and what they find."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.documents.doc_blocks import ROOT, defined_names, free_names, imported, wrong_uses
from support.documents.notebook_outputs import DIGEST, clean_outputs, code_digest

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def _cells(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_name_what_is_there(path: Path) -> None:
    """As the documents' blocks; the scripts that a notebook writes too."""
    before: set[str] = set()
    for cell in _cells(path):
        if cell.startswith("!"):
            continue
        is_script = cell.startswith("%%writefile")
        code = cell.partition("\n")[2] if is_script else cell
        unknown = free_names(code) - (set() if is_script else before) - {"__file__"}
        assert not unknown
        if "corpus" not in code:  # which lies beside the notebook
            assert not wrong_uses(code, imported(code))
        if not is_script:
            before |= defined_names(code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_carries_the_outputs_of_its_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert notebook["metadata"].get(DIGEST) == code_digest(notebook), (
        f"the outputs are older than the code: python tests/support/documents/notebook_outputs.py {path.stem}"
    )
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert all(output["output_type"] != "error" for output in outputs)
    assert not re.search(r"/(home|root|work|Users)/|\\u001b", text), "a path of a machine, or a terminal's colors"
    assert len(text) < 300_000


def test_outputs_are_cleaned() -> None:
    log = ["\x1b[1mloss\x1b[0m 2.0\n", "sagemaker.config INFO - Not applying\n", f"Model: {sys.prefix}/x /folder/y\n"]
    printed = [{"output_type": "stream", "name": name, "text": text} for name, text in zip("oeo", log, strict=True)]
    lines = {"output_type": "stream", "name": "o", "text": "".join(f"{number}\n" for number in range(100))}
    result = {"output_type": "execute_result", "metadata": {}, "data": {"text/html": "<p>", "text/plain": "x" * 999}}
    first, shown, long = clean_outputs([*printed, result, lines], "/folder")
    assert first == {"name": "stdout", "output_type": "stream", "text": "loss 2.0\nModel: …/x /path/to/y\n"}
    assert len(shown["data"]["text/plain"]) < 250
    assert (long["text"].count("\n"), "\n24\n…\n85\n" in long["text"]) == (41, True)


def _run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[dict[str, Any]]]:
    """What the notebook printed, and what it showed."""
    import nbformat
    from nbclient import NotebookClient

    # Shells of the notebook find the commands of this Python, and these the package that is tested.
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
    settings = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=170, kernel_name="python3", resources=settings).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs), [each["data"] for each in outputs if "data" in each]


@pytest.mark.full
@pytest.mark.job
@pytest.mark.timeout(200)
def test_a_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, shown = _run("pipeline", tmp_path, monkeypatch)
    assert re.search(r"^pipeline: stages=2 microbatches=4 idle=\d+%$", said, re.MULTILINE)
    partition, timeline = (data["text/html"] for data in shown if "<svg" in data.get("text/html", ""))
    assert "blocks.5.down: stage 1" in partition
    assert "enter: stage 0" in partition
    assert timeline.count("<rect") > 16
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\S+)", said)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


@pytest.mark.full
@pytest.mark.job
@pytest.mark.timeout(200)
def test_tensor_parallelism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, _ = _run("tensor_parallel", tmp_path, monkeypatch)
    there, here = re.search(r"loss over two ranks (\S+), in one process (\S+)", said).groups()
    assert float(there) == pytest.approx(float(here), abs=2e-4)
    assert float(there) < 2.5


@pytest.mark.full
@pytest.mark.job
@pytest.mark.timeout(300)
def test_sharded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, shown = _run("sharded_memory", tmp_path, monkeypatch)
    found = {
        name: (int(planned.replace(",", "")), int(measured.replace(",", "")))
        for name, planned, measured in re.findall(
            r"state, (\w+): planned ([\d,]+) bytes a rank, measured ([\d,]+)", said
        )
    }
    assert found.keys() == {"replicas", "sharded"}
    for planned, measured in found.values():
        assert measured == pytest.approx(planned, rel=0.01)
    assert found["sharded"][1] < 0.55 * found["replicas"][1]
    assert any("optimizer state" in data.get("text/html", "") for data in shown), "the plan shows itself"


@pytest.mark.full
@pytest.mark.job
@pytest.mark.timeout(300)
def test_another_topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, _ = _run("another_topology", tmp_path, monkeypatch)
    epochs = [int(epoch) for epoch in re.findall(r"epoch (\d): loss", said)]
    assert epochs[:4] == [0, 1, 2, 3]
    assert epochs[4] == 3, "the second job goes on in the epoch of the checkpoint"
    assert epochs[-1] == 7
    assert "another topology: 6 tensors, 85,002 parameters" in said


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, shown = _run("rehearsal", tmp_path, monkeypatch)
    verdicts = dict(re.findall(r"^(a copy on every GPU|sharded): (does not fit|fits), ", said, re.MULTILINE))
    assert verdicts == {"a copy on every GPU": "does not fit", "sharded": "fits"}
    copies, shared = (data["text/html"] for data in shown)
    assert (copies.count("<svg"), shared.count("<svg")) == (1, 2), (
        "the memory of each stage, and the partition of several"
    )
    assert "blocks.31: stage 3" in shared
    assert re.search(r"^training: [\d,]+ hours, [\d,]+ USD", said, re.MULTILINE)


@pytest.mark.full
@pytest.mark.job
@pytest.mark.timeout(300)
def test_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, _ = _run("trainer", tmp_path, monkeypatch)
    pairs = re.findall(r"^step \d+: one process (\S+), two stages (\S+)$", said, re.MULTILINE)
    assert len(pairs) == 12
    for alone, divided in pairs:
        assert float(divided) == pytest.approx(float(alone), abs=2e-4)
    first, last, parameters = re.search(
        r"^trainer: loss (\S+) to (\S+), ([\d,]+) parameters", said, re.MULTILINE
    ).groups()
    assert float(last) < float(first) / 2
    assert parameters == "180,800"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    # Nothing may ask for credentials or answers elsewhere.
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    said, shown = _run("cloud", tmp_path, monkeypatch)
    assert "3 processes, which is no divisor of the 16 processes" in said
    assert "[SMP102]" in said
    assert re.search(r"^parameters: .*\"tensor_parallel_degree\": 8", said, re.MULTILINE)
    assert re.search(
        r"^code: _smp_entry.py requirements.txt smp_estimator-\S+.whl train.ipynb train.py$", said, re.MULTILINE
    )
    assert re.search(r"^attached: .*'tensor_parallel_degree': 8", said, re.MULTILINE)
    assert any("16 ranks on 2 nodes: tensor parallel over 8" in data.get("text/html", "") for data in shown)


@pytest.mark.full
@pytest.mark.job
@pytest.mark.timeout(400)
def test_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, _ = _run("activations", tmp_path, monkeypatch)
    held = {
        name: float(size.replace(",", ""))
        for name, size in re.findall(r"^(\w+): at most (\S+) MiB of activations", said, re.MULTILINE)
    }
    assert held.keys() == {"none", "each", "group_4", "offloaded"}
    assert max(held["each"], held["group_4"]) < 0.45 * held["none"]
    inputs = 16384 * 512 * 4 / 2**20  # MiB of a layer's input: 16 of them without offloading, at most three with
    assert held["each"] - held["offloaded"] > 8 * inputs
    assert re.findall(r"^(\w+): loss \S+ to \S+, equal to none: (\w+)$", said, re.MULTILINE) == [
        ("none", "True"),
        ("checkpointed", "True"),
        ("offloaded", "True"),
    ]
    planned = [float(size) for size in re.findall(r"^planned, \w+: (\S+) GiB", said, re.MULTILINE)]
    assert planned == sorted(planned, reverse=True)
    assert planned[1] < planned[0]
