"""``smp-estimator verify`` of real scripts: the entry points, AWS's GPT-2 sample, families of Transformers, and ``Trainer``.

``pytest -s`` prints a row for the table of ``docs/how-it-works/numerics.md``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.platform.command_line import call, flat

pytestmark = [pytest.mark.job, pytest.mark.full, pytest.mark.timeout(400)]

_HOUSE = Path(__file__).parents[2]
_SCRIPTS = Path(__file__).parents[1] / "support" / "scripts"

STAGES = {"pipeline_parallel_degree": 2, "microbatches": 4}
TENSOR = {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}
SHARDED = {"sharded_data_parallel_degree": 2, "ddp": True, "sdp_param_persistence_threshold": 100}
DEGREES: dict[str, dict[str, Any]] = {
    "pp 2": STAGES,
    "tp 2": TENSOR,
    "sdp 2": SHARDED,
    "dp 2": {"ddp": True, "microbatches": 2},
    "pp 2, dp 2": {**STAGES, "ddp": True},
    "pp 2, tp 2": {**STAGES, **TENSOR},
}
GPT = ("--layers", "2", "--hidden", "32", "--seq_len", "16", "--batch_size", "8", "--eval_batches", "0")
FAMILIES = ("gpt2", "llama", "gptneox", "opt", "bert", "t5")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A channel with text, and one with the sample's lines of token ids."""
    text, ids = tmp_path / "text", tmp_path / "ids"
    text.mkdir()
    (text / "text.txt").write_text("the quick brown fox jumps over the lazy dog and goes on. " * 400)
    ids.mkdir()
    generator = torch.Generator().manual_seed(0)
    with (ids / "train_0.json").open("w") as file:
        for row in torch.randint(48, (32, 16), generator=generator).tolist():
            file.write(json.dumps({"input_ids": row, "attention_mask": [1] * 16}) + "\n")
    path = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("SM_CHANNEL_TRAIN", str(text))
    return tmp_path


def _verified(what: str, degrees: str, script: Path, *words: str, more: dict[str, Any] | None = None) -> None:
    parameters = json.dumps({**DEGREES[degrees], **(more or {})})
    said = flat(call("verify", str(script), "--parameters", parameters, "--steps", "2", "--", *words))
    assert "equal within rounding" in said
    found = said.rpartition("equal within rounding: ")[2]
    print(f"\n| {what} | {degrees} | {found} |")
    # Where tensor parallelism replaces the whole model by its own, only what has the same names in both is compared.
    assert int(found.split()[0].replace(",", "")) > (10 if "tp" in degrees else 40)
    assert "2 step(s)" in found


@pytest.mark.parametrize("degrees", ["pp 2", "tp 2", "sdp 2", "pp 2, dp 2"])
def test_of_train_gpt(data: Path, degrees: str) -> None:
    _verified("train_gpt.py", degrees, _HOUSE / "entrypoints" / "train_gpt.py", *GPT)


@pytest.mark.parametrize(("model", "degrees"), [("t5", "pp 2"), ("falcon", "tp 2"), ("t5", "dp 2")])
def test_of_train_generate(data: Path, model: str, degrees: str) -> None:
    _verified(f"train_generate.py ({model})", degrees, _HOUSE / "entrypoints" / "train_generate.py", "--model", model)


@pytest.mark.client("TRL", "verify", "sdp 2")
@pytest.mark.parametrize("objective", ["sft"])
def test_of_train_lora(data: Path, objective: str) -> None:
    pytest.importorskip("trl")
    _verified(
        f"train_lora.py ({objective})", "sdp 2", _HOUSE / "entrypoints" / "train_lora.py", "--objective", objective
    )


def test_of_a_script_without_the_library(data: Path) -> None:
    script = _HOUSE / "entrypoints" / "train_ddp.py"
    said = flat(call("verify", str(script), "--parameters", '{"ddp": true}', "--", "--steps", "2", code=1))
    assert "has recorded nothing" in said or "ended with exit code" in said


@pytest.mark.parametrize("degrees", ["pp 2", "tp 2", "pp 2, tp 2", "sdp 2"])
def test_of_the_gpt2_sample(data: Path, degrees: str) -> None:
    folders = ("--training-dir", "ids", "--test-dir", "ids", "--model-dir", "model", "--checkpoint-dir", "checkpoints")
    words = [str(data / word) if not word.startswith("--") else word for word in folders]
    words += ["--prescaled_batch", "1" if "tp" in degrees else "0"]
    _verified("the GPT-2 sample", degrees, _SCRIPTS / "gpt2_script.py", *words)


@pytest.mark.parametrize("degrees", ["pp 2", "tp 2", "sdp 2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_of_families(data: Path, family: str, degrees: str) -> None:
    _verified(family, degrees, _SCRIPTS / "family_script.py", family)


@pytest.mark.parametrize("degrees", ["pp 2", "sdp 2", "dp 2"])
def test_of_trainer(data: Path, degrees: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = {"partitions": DEGREES[degrees].get("pipeline_parallel_degree", 1)}
    _verified("Trainer", degrees, _SCRIPTS / "trainer_script.py", more=parameters)
