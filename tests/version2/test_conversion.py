"""Checkpoints of version 2 become those of version 1 and of Transformers, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.version2 import make_mixtral
from support.models.version2_mixtures import make_tabled
from support.training import version2_checkpoints as training

from smp_runtime.errors import CheckpointError

SHARD = {"hybrid_shard_degree": 2}


def _convert(*words: object, code: int = 0) -> str:
    from click.testing import CliRunner

    from smp_estimator.cli.main import main

    done = CliRunner().invoke(main, ["checkpoint", "convert", *map(str, words)])
    assert done.exit_code == code, done.output + repr(done.exception)
    return " ".join(done.output.split())


@pytest.mark.parametrize(
    ("config", "world"),
    [
        ({"tensor_parallel_degree": 2}, 4),
        ({"tensor_parallel_degree": 2, "hybrid_shard_degree": 1}, 2),
        ({"hybrid_shard_degree": 2}, 2),
    ],
)
def test_sharded_checkpoints_become_models_of_transformers_and_back(
    ranks: Any, tmp_path: Path, config: dict[str, Any], world: int
) -> None:
    from support.models.version2 import make_llama
    from transformers import AutoModelForCausalLM

    wanted = ranks(training.save_split, world, config, tmp_path / "saved", init=False, timeout=120)[0]
    make_llama().config.save_pretrained(tmp_path)
    _convert(tmp_path / "saved", tmp_path / "out", "--to", "transformers", "--config", tmp_path / "config.json")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64).state_dict()
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    _convert(tmp_path / "out", tmp_path / "again", "--to", "version2")
    loaded = ranks(training.load_converted, 2, {"hybrid_shard_degree": 2}, tmp_path / "again", init=False)[0]
    assert [name for name in wanted if not torch.equal(loaded[name], wanted[name])] == []
    if world == 4:
        said = _convert(tmp_path / "saved" / "tp2-0", tmp_path / "half", "--to", "full", code=1)
        assert "parts of 1 of 2 tensor parallel ranks" in said
        (tmp_path / "saved" / "tp2-1" / "ep1-0" / "smp_split.json").unlink()
        said = _convert(tmp_path / "saved", tmp_path / "half", "--to", "full", code=1)
        assert "has no smp_split.json" in said


def test_tensors_that_are_split_in_several_places_are_joined(ranks: Any, tmp_path: Path) -> None:
    from support.models.version2 import make_gpt2

    config = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}
    wanted = ranks(training.save_split, 4, config, tmp_path / "saved", make_gpt2, init=False, timeout=120)[0]
    _convert(tmp_path / "saved", tmp_path / "full.pt", "--to", "full")
    found = torch.load(tmp_path / "full.pt", weights_only=True)
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []
    assert "transformer.h.0.attn.c_attn.weight" in found  # queries, keys and values


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (make_tabled, {"hybrid_shard_degree": 2}),
        (make_mixtral, {"hybrid_shard_degree": 1, "tensor_parallel_degree": 2}),
    ],
    ids=["tables", "lists, split"],
)
def test_shared_experts_are_joined(ranks: Any, tmp_path: Path, make: Any, config: dict[str, Any]) -> None:
    config = {"expert_parallel_degree": 2, **config}
    wanted = ranks(training.save_split, 4, config, tmp_path / "saved", make, init=False, timeout=120)[0]
    _convert(tmp_path / "saved", tmp_path / "full.pt", "--to", "full")
    found = torch.load(tmp_path / "full.pt", weights_only=True)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    (part,) = tmp_path.glob("saved/tp*-0/ep2-1")
    (part / "smp_experts.json").unlink()
    said = _convert(tmp_path / "saved", tmp_path / "half", "--to", "full", code=1)
    assert "without smp_experts.json" in said
    assert "or a full state dict" in said
    (part / ".metadata").unlink()
    said = _convert(tmp_path / "saved", tmp_path / "half", "--to", "full", code=1)
    assert "has the checkpoints ep2-0, which are not those of all expert parallel ranks" in said


def test_checkpoints_of_version_1_become_those_of_version_2_and_back(ranks: Any, tmp_path: Path) -> None:
    wanted = ranks(_save_in_version_1, 2, tmp_path, config={"tensor_parallel_degree": 2, "ddp": True})[0]
    _convert(tmp_path / "1", tmp_path / "2", "--to", "version2")
    _convert(tmp_path / "2", tmp_path / "full.pt", "--to", "full")
    found = torch.load(tmp_path / "full.pt", weights_only=True)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def _save_in_version_1(root: Path) -> dict[str, torch.Tensor]:
    from support.models.version2 import make_llama

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    with smp.tensor_parallelism(enabled=True):
        net = make_llama()
    model = smp.DistributedModel(net)

    @smp.step
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    step(torch.arange(12).view(1, 12))
    smp.save_checkpoint(str(root / "1"), tag="3", model=model)
    smp.save_checkpoint(str(root / "whole"), tag="3.pt", model=model, partial=False)
    return torch.load(root / "whole" / "3.pt", weights_only=True)  # type: ignore[no-any-return]


def test_what_cannot_be_converted_is_refused_by_name(ranks: Any, tmp_path: Path) -> None:
    original = tmp_path / "original" / "tp0_ep0_fsdp0"
    original.mkdir(parents=True)
    (original / ".local.metadata").write_bytes(b"")
    assert "local checkpoint of the original library" in _convert(
        tmp_path / "original", tmp_path / "out", "--to", "full", code=1
    )
    ranks(training.save_whole, 2, SHARD, "local", tmp_path / "local", init=False)
    assert "has a local shard (SM_LOCAL_STATE_DICT)" in _convert(
        tmp_path / "local", tmp_path / "out", "--to", "full", code=1
    )
    ranks(training.save_whole, 2, SHARD, "now", tmp_path / "two" / "1steps", init=False)
    ranks(training.save_whole, 2, SHARD, "now", tmp_path / "two" / "2steps", init=False)
    assert "has 2 checkpoints: give one of them" in _convert(tmp_path / "two", tmp_path / "out", "--to", "full", code=1)
    assert "ends in .safetensors" in _convert(
        tmp_path / "two" / "1steps", tmp_path / "out", "--to", "safetensors", code=1
    )
    _convert(tmp_path / "two" / "1steps", tmp_path / "out.safetensors", "--to", "safetensors")
    from smp_version2.checkpoint.state_dict_loader import load

    with pytest.raises(CheckpointError, match="local checkpoint of the original library"):
        load({"x": torch.zeros(1)}, checkpoint_id=original)


def test_the_other_commands_name_checkpoints_of_version_2(ranks: Any, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from smp_estimator.cli.main import main

    ranks(training.save_whole, 2, SHARD, "now", tmp_path, init=False)
    done = CliRunner().invoke(main, ["checkpoint", "inspect", str(tmp_path)])
    assert done.exit_code == 1
    assert "convert reads them" in " ".join(done.output.split())
    done = CliRunner().invoke(main, ["checkpoint", "verify", str(tmp_path)])
    assert (done.exit_code, "whole" in done.output, "(version 2)" in done.output) == (0, True, True)
    manifest = json.loads(next(tmp_path.glob("checksums_*.json")).read_text())
    assert manifest["files"].keys() == {path.name for path in tmp_path.iterdir() if path.suffix != ".json"}
