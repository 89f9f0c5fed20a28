"""``smp-estimator checkpoint``: what it shows, what it finds wrong, and what it makes of checkpoints of every topology."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.models.huggingface import tiny_config
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_estimator.cli.main import main
from smp_runtime.checkpoint.files.records import digest_of

VOCABULARY, SEQ, BATCH = 43, 8, 4


def call(*arguments, code=0):
    result = CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])
    assert result.exit_code == code, result.output + repr(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return " ".join(result.output.split())


class Net(nn.Module):
    """Something tied, a buffer, a frozen parameter, and a parameter that the optimizer never sees."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Parameter(torch.randn(3, 5), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.norm(self.hidden(self.embedding(ids))))


def _save(path, tags, dtype=None):
    """On every rank: train a step and save, for every tag; returns the whole state after the last."""
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @smp.step
    def step(ids):
        loss = model(ids).float().square().mean()
        model.backward(loss)
        return loss

    state = None
    for number, tag in enumerate(tags):
        torch.manual_seed(10 + number)
        optimizer.zero_grad()
        step(torch.randint(0, 11, (BATCH,)))
        optimizer.step()
        smp.save_checkpoint(path, tag=tag, user_content={"tag": tag})
        state = {name: value.clone().cpu() for name, value in model.state_dict().items()}
    return state


@pytest.fixture
def saved(solo, tmp_path):
    """Two checkpoints of one process, ``one`` and ``two``; and the state at ``two``."""
    solo({})
    state = _save(str(tmp_path / "checkpoints"), ["one", "two"])
    smp.shutdown()
    return tmp_path / "checkpoints", state


# -- inspect -----------------------------------------------------------------------------------------------------------


def test_inspect_shows_what_is_there(saved):
    folder, _ = saved
    elements = sum(p.numel() for p in Net().parameters())
    said = call("inspect", folder)
    assert "two_partial (newest)" in said
    assert "one_partial" in said
    assert "1 rank" in said
    assert "1 ranks" not in said
    assert f"{elements:,}" in said
    assert "AdamW of" in said
    assert "exp_avg" in said
    assert "model_0.pt" in said
    assert "embedding.weight" not in said
    said = call("inspect", folder, "--tensors")
    assert "= head.weight" in said
    assert "11 × 6" in said
    assert "norm.running_mean" in said


def test_inspect_as_json(saved):
    folder, state = saved
    about = json.loads(call("inspect", folder, "--json", "--tensors", "--tag", "one"))
    assert about["newest"] == about["resumes"] == "two_partial"
    assert [c["name"] for c in about["checkpoints"]] == ["two_partial", "one_partial"]
    two, one = about["checkpoints"]
    assert "tensors" not in two
    assert one["tensors"].keys() == state.keys() - {"head.weight"}
    assert one["tensors"]["embedding.weight"]["shape"] == [11, 6]
    assert one["tensors"]["norm.running_mean"]["buffer"]
    assert one["topology"]["world_size"] == 1
    assert one["parameters"] == sum(p.numel() for p in Net().parameters())
    assert one["bytes"] == sum(file["bytes"] for file in one["files"].values())
    assert {name: file["bytes"] for name, file in one["files"].items()} == {
        p.name: p.stat().st_size for p in (folder / "one_partial").iterdir() if p.name != "manifest.json"
    }


def test_the_path_may_be_above_or_the_checkpoint_itself(saved):
    folder, _ = saved
    assert "two_partial" in call("inspect", folder.parent)
    assert "one_partial" not in call("inspect", folder / "two_partial")
    assert "two_partial" in call("inspect", f"file://{folder}")


def test_an_unfinished_and_a_cut_folder_are_shown_as_not_complete(saved):
    folder, _ = saved
    (folder / "two_partial" / "manifest.json").unlink()
    file = folder / "one_partial" / "model_0.pt"
    file.write_bytes(file.read_bytes()[:-1])
    said = call("inspect", folder)
    assert "not complete two_partial" in said
    assert "has no manifest.json" in said
    assert "model_0.pt has" in said
    assert "the file newest names two_partial, which is not complete" in said
    assert json.loads(call("inspect", folder, "--json"))["resumes"] is None
    assert "no whole checkpoint to convert" in call("convert", folder, folder / "out.pt", "--to", "full", code=1)


def test_inspect_says_that_it_does_not_read_what_verify_finds(saved):
    folder, _ = saved
    file = folder / "two_partial" / "model_0.pt"
    content = bytearray(file.read_bytes())
    content[200:208] = bytes(byte ^ 255 for byte in content[200:208])
    file.write_bytes(content)
    said = call("inspect", folder)
    assert "whole" not in said
    assert f"What is in them was not read: smp-estimator checkpoint verify {folder}" in said
    assert [c["complete"] for c in json.loads(call("inspect", folder, "--json"))["checkpoints"]] == [True, True]
    assert "broken two_partial" in call("verify", folder, code=1)


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["convert", "--to", "full"]])
def test_wrong_paths(tmp_path, command):
    out = [tmp_path / "out"] if command[0] == "convert" else []
    assert "no such folder" in call(*command, tmp_path / "none", *out, code=1)
    assert "neither it nor a folder below" in call(*command, tmp_path, *out, code=1)
    assert "aws s3 cp --recursive s3://bucket/x" in call(*command, "s3://bucket/x", *out, code=1)
    for name in "ab":
        (tmp_path / name / "1_partial").mkdir(parents=True)
    assert "2 folders have checkpoints" in call(*command, tmp_path, *out, code=1)


def test_a_wrong_tag_names_the_others(saved):
    assert "two_partial, one_partial" in call("inspect", saved[0], "--tag", "three", code=1)


def test_looking_needs_neither_torch_nor_a_job(saved):
    folder, _ = saved
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"  # as if it were not installed
        "from smp_estimator.cli.main import main\n"
        f"main(['checkpoint', 'inspect', {str(folder)!r}], standalone_mode=False)\n"
        "try:\n"
        f"    main(['checkpoint', 'verify', {str(folder)!r}], standalone_mode=False)\n"
        "except Exception as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "two_partial" in done.stdout, done.stderr
    assert "pip install 'torch" in done.stdout


# -- verify ------------------------------------------------------------------------------------------------------------


def test_whole_checkpoints_pass(saved):
    folder, _ = saved
    said = call("verify", folder)
    assert "whole two_partial" in said
    assert "whole one_partial" in said
    assert "one_partial" not in call("verify", folder, "--tag", "two")


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model_0.pt", "optimizer_0.pt", "rng_0.pt", "user_content.pt"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_named(saved, name, damage):
    folder, _ = saved
    file = folder / "two_partial" / name
    if damage == "flip":
        _flip(file)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    said = call("verify", folder, code=1)
    wrong = {"flip": "has other content than was saved", "cut": "were saved", "remove": "is missing"}[damage]
    assert "broken two_partial" in said
    assert name in said
    assert wrong in said
    assert "whole one_partial" in said
    assert "resuming takes one_partial" in said
    call("verify", folder, "--tag", "one")


def _edit(folder, change):
    """Change a manifest, with a checksum of itself that fits."""
    file = folder / "manifest.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps({**data, "digest": digest_of(data)}))


def _pieces_of(data, key, name):
    return next((file, keys[key]) for file, keys in data["pieces"].items() if name in keys.get(key, {}))


def test_weights_that_no_file_has(saved):
    folder, _ = saved

    def forget(data):
        _, names = _pieces_of(data, "module", "hidden.0.weight")
        del names["hidden.0.weight"]

    _edit(folder / "two_partial", forget)
    assert "no file has the weight hidden.0.weight" in call("verify", folder, code=1)


@pytest.mark.parametrize(
    ("flat", "said"),
    [
        ([0, 35], "lacks elements 35 to 36 of 36"),
        ([1, 36], "lacks elements 0 to 1"),
        ([0, 37], "up to 37, but there are 36"),
    ],
)
def test_states_that_are_there_in_part(saved, flat, said):
    folder, _ = saved

    def change(data):
        _, names = _pieces_of(data, "exp_avg", "hidden.0.weight")
        names["hidden.0.weight"] = [None, None, *flat]

    _edit(folder / "two_partial", change)
    found = call("verify", folder, code=1)
    assert "the state 'exp_avg' of hidden.0.weight" in found
    assert said in found


def test_weights_that_are_there_twice(saved):
    folder, _ = saved

    def change(data):
        file, names = _pieces_of(data, "module", "hidden.0.weight")
        other = next(name for name in data["pieces"] if name != file)
        data["pieces"][other].setdefault("module", {})["hidden.0.weight"] = names["hidden.0.weight"]

    _edit(folder / "two_partial", change)
    assert "has elements 0 to 36 of 36 twice" in call("verify", folder, code=1)


def test_a_file_of_another_checkpoint_with_a_matching_checksum(saved):
    import hashlib

    folder, _ = saved
    file = folder / "two_partial" / "model_0.pt"
    content = torch.load(file, weights_only=True)
    content["module"]["hidden.0.weight"] = torch.zeros(5, 5)
    del content["module"]["hidden.2.bias"]
    torch.save(content, file)

    def change(data):
        data["files"]["model_0.pt"] = {
            **data["files"]["model_0.pt"],
            "bytes": file.stat().st_size,
            "checksum": f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}",
        }

    _edit(folder / "two_partial", change)
    said = call("verify", folder, code=1)
    assert "'module' of hidden.0.weight cannot be read from model_0.pt" in said
    assert "'module' of hidden.2.bias cannot be read from model_0.pt" in said


def test_newest_that_names_nothing(saved):
    folder, _ = saved
    (folder / "newest").write_text("three_partial")
    assert "newest names three_partial" in call("verify", folder, code=1)


# -- convert -----------------------------------------------------------------------------------------------------------

TOPOLOGIES = {
    "pp2": (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "sharded2": (2, {"sharded_data_parallel_degree": 2, "ddp": True}),
    "state sharded, bf16": (2, {"shard_optimizer_state": True, "ddp": True, "bf16": True}),
    "sharded2, bf16": (2, {"sharded_data_parallel_degree": 2, "ddp": True, "bf16": True}),
    "pp2 sharded2": (
        4,
        {"pipeline_parallel_degree": 2, "microbatches": 2, "sharded_data_parallel_degree": 2, "ddp": True},
    ),
}


@pytest.mark.parametrize(
    "topology",
    [pytest.param(name, marks=[] if name in ("pp2", "sharded2, bf16") else pytest.mark.full) for name in TOPOLOGIES],
)
def test_any_topology_becomes_one_state(ranks, tmp_path, topology):
    from safetensors.torch import load_file

    world, config = TOPOLOGIES[topology]
    states = ranks(_save, world, str(tmp_path / "checkpoints"), ["a", "b"], config=config)
    expected = states[0]
    call("verify", tmp_path / "checkpoints")
    assert f" {len(expected)} tensors, " in call("convert", tmp_path, tmp_path / "full.pt", "--to", "full")
    whole = torch.load(tmp_path / "full.pt", weights_only=True)
    assert whole.keys() == expected.keys()
    for name, value in expected.items():
        assert whole[name].dtype == value.dtype
        assert torch.equal(whole[name], value), name
    Net().load_state_dict(whole)
    call("convert", tmp_path, tmp_path / "w.safetensors", "--to", "safetensors", "--dtype", "float32")
    once = load_file(tmp_path / "w.safetensors")
    assert once.keys() == expected.keys() - {"head.weight"}
    exact = 0
    for name, value in once.items():
        torch.testing.assert_close(value, expected[name].to(value.dtype), rtol=1e-2, atol=1e-3)
        exact += not torch.equal(value, value.bfloat16().to(value.dtype))
    if "bf16" in topology:  # the float32 weights, not the rounded ones
        assert exact >= 3


def _save_distributed(path, source):
    """Two tensor parallel ranks train a model of Transformers a step and save."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import smdistributed.modelparallel.torch as smp

    with smp.tensor_parallelism():
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    ids = torch.arange(2 * SEQ).view(2, SEQ)[smp.tp_rank() :][:1]

    @smp.step
    def step(ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    step(ids)
    optimizer.step()
    smp.save_checkpoint(path, tag="1")
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
def test_a_distributed_model_becomes_one_of_transformers(ranks, tmp_path, family):
    import transformers as hf

    config = tiny_config(family, VOCABULARY)
    config.save_pretrained(tmp_path / "config")
    logits = ranks(
        _save_distributed,
        2,
        str(tmp_path / "checkpoints"),
        str(tmp_path / "config"),
        config={"tensor_parallel_degree": 2, "ddp": True},
    )
    call("verify", tmp_path / "checkpoints")
    said = call("convert", tmp_path, tmp_path / "hf", "--to", "transformers", "--largest-file", "20KB")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert f" {len(index['weight_map'])} tensors, " in said
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        found = model(input_ids=torch.arange(2 * SEQ).view(2, SEQ)).logits
    torch.testing.assert_close(found, torch.cat(logits), atol=1e-5, rtol=1e-5)
    # And back: a file that resume_from_checkpoint(partial=False) takes, here as plain torch does.
    call("convert", tmp_path / "hf", tmp_path / "full.pt", "--to", "full")
    again = hf.AutoModelForCausalLM.from_config(config)
    again.load_state_dict(torch.load(tmp_path / "full.pt", weights_only=True), strict=False)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_a_model_without_configuration_asks_for_it(saved, tmp_path):
    folder, _ = saved
    said = call("convert", folder, tmp_path / "hf", "--to", "transformers", code=1)
    assert "--config" in said
    assert "--to safetensors" in said
    config = tmp_path / "c.json"
    config.write_text('{"model_type": "other"}')
    call("convert", folder, tmp_path / "hf", "--to", "transformers", "--config", config)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "float32"
    config.write_text("[")
    assert "is no JSON" in call("convert", folder, tmp_path / "x", "--to", "transformers", "--config", config, code=1)


def test_nothing_is_overwritten(saved, tmp_path):
    folder, _ = saved
    (tmp_path / "there.pt").write_text("")
    assert "nothing is overwritten" in call("convert", folder, tmp_path / "there.pt", "--to", "full", code=1)
    said = call("convert", folder, tmp_path / "x", "--to", "full", "--largest-file", "5 apples", code=1)
    assert "for example 5GB" in said


def test_an_earlier_checkpoint_by_its_tag(saved, tmp_path):
    folder, state = saved
    call("convert", folder, tmp_path / "one.pt", "--to", "full", "--tag", "one")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert not torch.equal(found["hidden.0.weight"], state["hidden.0.weight"])
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()


def test_streaming_takes_the_memory_of_one_tensor(solo, tmp_path):
    """Sixteen tensors of 8 MB become 4 MB each, and the process grows by less than two of those while it converts."""
    solo({})
    model = smp.DistributedModel(nn.Sequential(*(nn.Linear(1024, 2048, bias=False) for _ in range(16))))
    smp.save_checkpoint(str(tmp_path / "c"), tag="1", model=model)
    smp.shutdown()
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from smp_estimator.cli.main import main\n"
        "from smp_runtime.checkpoint.full import conversion\n"
        "def anonymous():\n"  # what is mapped from files can be dropped at any time
        "    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssAnon'))\n"
        "from smp_runtime.checkpoint.files import safetensors_writer as safetensors_file\n"
        "before, peak, write = anonymous(), 0, safetensors_file._write\n"
        "def watched(value, file):\n"
        "    global peak\n"
        "    write(value, file)\n"
        "    peak = max(peak, anonymous() - before)\n"
        "safetensors_file._write = watched\n"
        "result = CliRunner().invoke(main, ['checkpoint', 'convert', sys.argv[1], sys.argv[2], '--to', 'safetensors',"
        " '--dtype', 'bfloat16'])\n"
        "assert result.exit_code == 0, result.output\n"
        "print(peak / 1024)\n"
    )
    out = str(tmp_path / "out.safetensors")
    # Freed memory goes back at once instead of being kept for the next tensor.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), out], capture_output=True, text=True, timeout=60, env=env
    )
    assert done.returncode == 0, done.stderr
    assert Path(out).stat().st_size > 16 * 4 * 2**20
    assert float(done.stdout) < 8
