"""To and from Transformers: weights that it wrote train on at any topology, and what they become loads in it again."""

from __future__ import annotations

import json

import pytest
import torch
from support.models.huggingface import tiny_config
from support.training.rank_training import training_step, updates
from support.training.reference import train_alone

import smdistributed.modelparallel.torch as smp
from smp_runtime.checkpoint.files.name_translation import TranslatedTensor, record_of
from smp_runtime.checkpoint.files.transformers_format import config_of, read_weights, write_transformers
from smp_runtime.errors import CheckpointError, SMPUserError

BATCH, SEQ, VOCABULARY, STEPS = 4, 8, 43, 3
FAMILIES = ["gpt2", "llama"]


def _original(family):
    """A tiny model with random values everywhere."""
    import transformers as hf

    config = tiny_config(family, VOCABULARY)
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model


def _batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, VOCABULARY, (BATCH, SEQ), generator=generator)


def _adamw(parameters):
    # A large eps: without it a gradient of almost nothing moves a weight by a whole learning rate, either way.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2)


def _batches():
    return ((_batch(step),) for step in range(STEPS))


def _loss(model, ids):
    return model(input_ids=ids, labels=ids).loss


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """For each family: a folder of Transformers, the losses of plain training from there, and the logits after it."""
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        model = _original(family)
        model.save_pretrained(folder)
        trained = train_alone(model, _adamw, _batches(), _loss)
        found[family] = (folder, trained.losses, _logits(model))
    return found


@torch.no_grad()
def _logits(model):
    return model.eval()(input_ids=_batch(STEPS)).logits


def _import_train_export(family, source, target, tag):
    """One rank: wrap a model with other weights, import, train, export; returns its losses."""
    import contextlib

    import smdistributed.modelparallel.torch as smp

    split = smp.tensor_parallelism() if smp.tp_size() > 1 else contextlib.nullcontext()
    config = _original(family).config
    torch.manual_seed(5)
    with split:
        from transformers import AutoModelForCausalLM

        module = AutoModelForCausalLM.from_config(config)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(_adamw(model.parameters()))
    content = smp.resume_from_checkpoint(source, tag=tag, partial=False, load_optimizer=False)
    assert content is None

    losses = list(updates(training_step(model, _loss), optimizer, _batches()))
    smp.save_checkpoint(target, tag=tag, partial=False, user_content={"step": STEPS})
    assert smp.resume_from_checkpoint(target, tag=tag, partial=False) == {"step": STEPS}
    return losses


TOPOLOGIES = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel_degree": 2, "ddp": True}),
    "tp2 vocabulary": (2, {"tensor_parallel_degree": 2, "ddp": True, "optimize": "speed"}),
    "pp2": (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "sharded2": (2, {"sharded_data_parallel_degree": 2, "ddp": True, "sdp_gradient_clipping": 1e9}),
    "state sharded": (2, {"shard_optimizer_state": True, "ddp": True}),
    "pp2 tp2": (
        4,
        {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "microbatches": 2, "ddp": True},
    ),
}
SAMPLE = {("gpt2", "tp2"), ("llama", "pp2"), ("gpt2", "sharded2"), ("llama", "tp2")}


@pytest.mark.parametrize(
    ("family", "topology"),
    [
        pytest.param(family, topology, marks=[] if (family, topology) in SAMPLE else pytest.mark.full)
        for family in FAMILIES
        for topology in TOPOLOGIES
    ],
)
def test_weights_of_transformers_train_on_and_load_there_again(ranks, references, tmp_path, family, topology):
    from transformers import AutoModelForCausalLM

    source, expected, logits = references[family]
    world, config = TOPOLOGIES[topology]
    losses = ranks(
        _import_train_export, world, family, str(source), str(tmp_path), "model.safetensors", config=config, timeout=100
    )
    for of_rank in losses:
        assert of_rank == pytest.approx(expected, abs=1e-5)
    assert {"config.json", "model.safetensors"} <= {p.name for p in tmp_path.iterdir()}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert model.config.architectures == [type(model).__name__]
    torch.testing.assert_close(_logits(model), logits, atol=1e-5, rtol=1e-5)
    assert (tmp_path / "user_content_model.safetensors").exists()


def _all_families():
    import transformers as hf

    common = {"vocab_size": VOCABULARY}
    gpt = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16} | common
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48} | common
    neo = {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]]} | common
    return {
        "gptj": hf.GPTJForCausalLM(hf.GPTJConfig(**gpt, rotary_dim=4)),
        "gptneo": hf.GPTNeoForCausalLM(hf.GPTNeoConfig(**neo, window_size=3, max_position_embeddings=16)),
        "gptneox": hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**sizes, max_position_embeddings=16)),
        "llama tied": hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, tie_word_embeddings=True)),
        "inside gpt2": hf.GPT2Model(hf.GPT2Config(**gpt)),
        "bert": hf.BertForMaskedLM(hf.BertConfig(**sizes)),
        "roberta": hf.RobertaForMaskedLM(hf.RobertaConfig(**sizes)),
    }


def _to_and_fro(family, source, target):
    """A distributed model with other weights takes those of ``source`` and writes them to ``target``."""
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(9)
    with smp.tensor_parallelism():
        module = _all_families()[family]
    model = smp.DistributedModel(module)
    smp.resume_from_checkpoint(source, tag="model.safetensors", partial=False, load_optimizer=False)
    smp.save_checkpoint(target, tag="model.safetensors", partial=False, model=model)
    return any(record.placement.tensor_axis is not None for record in model.registry)


FAMILY_SAMPLE = ["bert", "llama tied"]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in FAMILY_SAMPLE else pytest.mark.full)
        for family in ["bert", "roberta", "gptj", "gptneo", "gptneox", "llama tied", "inside gpt2"]
    ],
)
def test_every_family_comes_back_bit_for_bit(ranks, tmp_path, family):
    original = _all_families()[family]
    original.save_pretrained(tmp_path / "a")
    config = {"tensor_parallel_degree": 2, "ddp": True}
    assert all(ranks(_to_and_fro, 2, family, str(tmp_path / "a"), str(tmp_path / "b"), config=config, timeout=100))
    again = type(original).from_pretrained(tmp_path / "b")
    expected = original.state_dict()
    for name, value in again.state_dict().items():
        assert torch.equal(value, expected[name]), name
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["architectures"] == [type(original).__name__]


# -- layouts of files ------------------------------------------------------------------------------------------------


def _save(original, folder, largest_file, name):
    import transformers

    is_pickled = name == "pytorch_model.bin"
    if not is_pickled or int(transformers.__version__.partition(".")[0]) < 5:
        original.save_pretrained(folder, max_shard_size=largest_file, safe_serialization=not is_pickled)
    else:  # Transformers 5 writes safetensors only; older folders are read all the same
        from huggingface_hub import save_torch_state_dict

        original.config.save_pretrained(folder)
        sizes = {"max_shard_size": largest_file, "filename_pattern": "pytorch_model{suffix}.bin"}
        save_torch_state_dict(original.state_dict(), folder, safe_serialization=False, **sizes)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".bin" if is_pickled else ".safetensors"}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("largest_file", [10**9, 20_000])
@pytest.mark.parametrize("asked", ["file", "folder"])
def test_every_layout_is_read_as_transformers_wrote_it(solo, tmp_path, name, largest_file, asked):
    original = _original("gpt2")
    _save(original, tmp_path, largest_file, name)
    assert (tmp_path / name).exists() == (largest_file == 10**9)
    solo({})
    model = smp.DistributedModel(type(original)(original.config))
    path, tag = (tmp_path, name) if asked == "file" else (tmp_path.parent, tmp_path.name)
    assert smp.resume_from_checkpoint(str(path), tag=tag, partial=False, load_optimizer=False) is None
    for key, value in original.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_the_other_of_transformers_names_is_found(solo, tmp_path, size):
    original = _original("gpt2")
    original.save_pretrained(tmp_path, max_shard_size=size)
    solo({})
    model = smp.DistributedModel(type(original)(original.config))
    smp.resume_from_checkpoint(str(tmp_path), tag="pytorch_model.bin", partial=False, load_optimizer=False)
    assert torch.equal(model.state_dict()["transformer.wte.weight"], original.transformer.wte.weight)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_in_shards_load_in_transformers(tmp_path, name, dtype):
    from transformers import AutoModelForCausalLM

    original = _original("gpt2").to(dtype)
    state = {key: value for key, value in original.state_dict().items() if key != "lm_head.weight"}
    files = write_transformers(tmp_path / name, state, config_of(original), largest_file=20_000)
    assert len(files) > 2
    assert max(file.stat().st_size for file in files) < 30_000
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, torch_dtype="auto")
    for key, value in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    # In one file afterwards: nothing is left that would be read instead.
    write_transformers(tmp_path / name, state, config_of(original))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", name]


def test_every_type_of_safetensors_is_written_as_its_library_reads_it(tmp_path):
    from safetensors.torch import load_file

    types = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    types += [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
    state = {str(dtype): torch.arange(7).to(dtype) for dtype in types}
    state |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "turned": torch.arange(6.0).view(2, 3).t()}
    write_transformers(tmp_path / "model.safetensors", state)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == state.keys()
    for key, value in state.items():
        assert loaded[key].dtype == value.dtype
        assert loaded[key].shape == value.shape
        assert loaded[key].tolist() == value.tolist(), key
    # Each lies where a mapped file can be used as it is.
    raw = (tmp_path / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    for key, value in state.items():
        assert (begin + header[key]["data_offsets"][0]) % value.element_size() == 0, key
    with pytest.raises(SMPUserError, match="x is of type torch.complex64.*torch.save"):
        write_transformers(tmp_path / "model.safetensors", {"x": torch.zeros(2, dtype=torch.complex64)})


def test_a_file_of_an_old_pytorch_is_read(tmp_path):
    state = {"x": torch.ones(3)}
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(read_weights(tmp_path / "pytorch_model.bin")["x"], state["x"])


# -- what can be wrong -----------------------------------------------------------------------------------------------


@pytest.fixture
def in_shards(tmp_path):
    write_transformers(tmp_path / "model.safetensors", {name: torch.ones(10) for name in "abcd"}, largest_file=80)
    return tmp_path


def test_missing_shards_are_named(in_shards):
    (in_shards / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names 2 files, but model-00002-of-00002\.safetensors is missing"):
        read_weights(in_shards)


def test_a_shard_of_another_checkpoint(in_shards):
    write_transformers(in_shards / "other.safetensors", {"c": torch.ones(1)})
    (in_shards / "other.safetensors").rename(in_shards / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks d .*different checkpoints"):
        read_weights(in_shards)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {"a": "../a.safetensors"}}'])
def test_a_broken_index(in_shards, text):
    (in_shards / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="is no index of weights"):
        read_weights(in_shards)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_damaged_file_is_refused_by_name(tmp_path, name):
    write_transformers(tmp_path / name, {"a": torch.ones(1000)})
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        read_weights(tmp_path)


def test_nothing_there_and_no_dictionary(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint file .*nothing.*pytorch_model\.bin"):
        read_weights(tmp_path)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="holds a list"):
        read_weights(tmp_path / "list.pt")


def test_another_model_is_an_error_that_names_parameters(solo, references):
    solo({})
    folder, _, _ = references["llama"]
    model = smp.DistributedModel(_original("gpt2"))
    before = model.module.lm_head.weight.clone()
    with pytest.raises(
        CheckpointError, match=r"does not fit this GPT2LMHeadModel.*it lacks .*transformer\.wpe\.weight"
    ):
        smp.resume_from_checkpoint(str(folder), tag="model.safetensors", partial=False, load_optimizer=False)
    assert torch.equal(model.module.lm_head.weight, before)


def test_a_rank_without_the_file_keeps_all_from_loading(ranks, references, tmp_path):
    def run(folder, elsewhere):
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(_original("gpt2"))
        with torch.no_grad():
            model.module.lm_head.weight.fill_(7.0)
        with pytest.raises(CheckpointError, match="no checkpoint file" if smp.rank() == 1 else "rank 1 cannot load"):
            smp.resume_from_checkpoint(
                elsewhere if smp.rank() == 1 else folder, tag="model.safetensors", partial=False, load_optimizer=False
            )
        return bool((model.module.lm_head.weight == 7.0).all())

    assert ranks(run, 2, str(references["gpt2"][0]), str(tmp_path), config={"ddp": True}) == [True, True]


def test_half_precision_starts_from_the_unrounded_weights(solo, references):
    folder, _, _ = references["gpt2"]
    solo({"bf16": True})
    model = smp.DistributedModel(type(_original("gpt2"))(_original("gpt2").config))
    optimizer = smp.DistributedOptimizer(_adamw(model.parameters()))
    smp.resume_from_checkpoint(str(folder), tag="model.safetensors", partial=False, load_optimizer=False)
    expected = _original("gpt2").transformer.wpe.weight
    parameter = model.module.transformer.wpe.weight
    assert torch.equal(parameter, expected.bfloat16())
    assert torch.equal(model.optimizer_shards[parameter].optimized, expected)
    assert optimizer is not None


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["own", "as on the hub", "of another wrapper", "one name for a tied weight", "old"])
def test_names_of_states_are_understood(solo, tmp_path, names):
    original = _original("gpt2")
    own = original.state_dict()
    state = {
        "own": lambda: own,
        "as on the hub": lambda: {
            **{name.removeprefix("transformer."): value for name, value in own.items() if name != "lm_head.weight"},
            "h.0.attn.bias": torch.ones(1, 1, 16, 16),
        },
        "of another wrapper": lambda: {f"module.{name}": value for name, value in own.items()},
        "one name for a tied weight": lambda: {n: v for n, v in own.items() if n != "transformer.wte.weight"},
        "old": lambda: {
            **own,
            "transformer.h.0.attn.bias": torch.ones(1),
            "transformer.h.0.attn.masked_bias": torch.ones(1),
        },
    }[names]()
    torch.save(state, tmp_path / "pytorch_model.bin")
    solo({})
    model = smp.DistributedModel(type(original)(original.config))
    smp.resume_from_checkpoint(str(tmp_path), tag="pytorch_model.bin", partial=False, load_optimizer=False)
    for name, value in model.state_dict().items():
        assert torch.equal(value, own[name]), name


def test_the_model_inside_takes_the_weights_of_one_with_a_head(solo, tmp_path):
    original = _original("llama")
    original.save_pretrained(tmp_path)
    solo({})
    inside = type(original.model)(original.config)
    model = smp.DistributedModel(inside)
    smp.resume_from_checkpoint(
        str(tmp_path), tag="model.safetensors", partial=False, load_optimizer=False, strict=False
    )
    for name, value in model.state_dict().items():
        assert torch.equal(value, original.model.state_dict()[name]), name


def test_a_translation_without_values_is_the_same_as_with_them():
    import transformers as hf

    from smp_runtime.module_conversion.huggingface.gpt2 import NAMES as GPT2
    from smp_runtime.module_conversion.huggingface.gptneox import NAMES as NEOX
    from smp_runtime.module_conversion.huggingface.llama import NAMES as LLAMA

    neox = hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(
            hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=48, vocab_size=43
        )
    )
    for names, model in ((GPT2, _original("gpt2")), (LLAMA, _original("llama")), (NEOX, neox)):
        state = model.half().state_dict()
        for head in ("lm_head.weight", "embed_out.weight"):  # whether it is tied is seen by comparing values
            state.pop(head, None)
        leaves = {name: TranslatedTensor.leaf(name, record_of(value)) for name, value in state.items()}
        ours, expected = names.to_ours(leaves), names.to_ours(state)
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            assert (ours[name].shape, ours[name].dtype) == (value.shape, torch.float16)
            assert torch.equal(ours[name].value(state.__getitem__), value), name
        back = names.to_theirs(ours)
        for name, value in state.items():
            assert torch.equal(back[name].value(state.__getitem__), value), name
