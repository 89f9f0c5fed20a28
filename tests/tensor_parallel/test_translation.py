"""States under Hugging Face's names: nothing is lost, wherever a script keeps the Hugging Face model."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPRuntimeError

SIZES = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 8, "vocab_size": 11}


class Wrapper(nn.Module):
    """A script's own module around Hugging Face models."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.own = nn.Parameter(torch.randn(3))


def _gpt2(kind="GPT2LMHeadModel", **options):
    import transformers as hf

    return getattr(hf, kind)(hf.GPT2Config(**SIZES, **options))


def _bert():
    import transformers as hf

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 24}
    return hf.BertModel(hf.BertConfig(**sizes, vocab_size=11, max_position_embeddings=8))


CASES = {
    "inside": lambda: Wrapper(lm=_gpt2()),
    "like the root": lambda: Wrapper(transformer=_gpt2()),
    "untied, like the root": lambda: Wrapper(transformer=_gpt2(tie_word_embeddings=False)),
    "without a head": lambda: Wrapper(backbone=_gpt2("GPT2Model")),
    "bare": lambda: _gpt2("GPT2Model"),
    "two kinds": lambda: Wrapper(encoder=_bert(), decoder=_gpt2(), head=nn.Linear(4, 4)),
}


def _made(case, seed):
    torch.manual_seed(seed)
    return CASES[case]()


def _full_and_back(case, path, name):
    """Trains nothing: a distributed model with other values takes the original's and writes them."""
    with smp.tensor_parallelism():
        module = _made(case, 9)
    model = smp.DistributedModel(module)
    smp.resume_from_checkpoint(path, tag=f"original{name}", partial=False, load_optimizer=False)
    smp.save_checkpoint(path, tag=f"again{name}", partial=False, model=model)


def _read(path):
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True)
    from safetensors.torch import load_file

    return load_file(path)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [".pt", ".safetensors"])
def test_a_full_checkpoint_has_every_tensor_of_the_original(solo, tmp_path, case, name):
    original = _made(case, 1)
    state = original.state_dict()
    if name == ".pt":
        torch.save(state, tmp_path / f"original{name}")
    else:
        from safetensors.torch import save_file

        first = {value.data_ptr(): key for key, value in reversed(state.items())}
        save_file({key: state[key] for key in first.values()}, tmp_path / f"original{name}")
    solo({"ddp": True})
    _full_and_back(case, str(tmp_path), name)
    found = _read(tmp_path / f"again{name}")
    if name == ".pt":
        assert set(found) == set(state)
    else:  # a tied weight once
        assert sum(v.numel() for v in found.values()) == sum(p.numel() for p in original.parameters()) + sum(
            b.numel() for n, b in original.named_buffers() if n in state
        )
    for key, value in found.items():
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize("case", ["inside", "like the root", "bare"])
def test_public_translations_there_and_back(solo, case):
    solo({"ddp": True})
    state = _made(case, 1).state_dict()
    with smp.tensor_parallelism():
        model = smp.DistributedModel(_made(case, 9))
    gpt2 = smp.nn.huggingface.gpt2
    model.load_state_dict(gpt2.translate_hf_state_dict_to_smdistributed_gpt2(state))
    back = gpt2.translate_state_dict_to_hf_gpt2(model.state_dict())
    assert set(back) == set(state)
    assert all(torch.equal(back[name], value) for name, value in state.items())


def test_names_that_a_translation_does_not_know_stay():
    gpt2 = smp.nn.huggingface.gpt2
    state = _gpt2().state_dict()
    state |= {"transformer.h.0.adapter.weight": torch.ones(2), "transformer.prompt": torch.ones(3)}
    ours = gpt2.translate_hf_state_dict_to_smdistributed_gpt2(state)
    assert {"transformer.h.0.adapter.weight", "transformer.prompt"} <= set(ours)
    assert set(gpt2.translate_state_dict_to_hf_gpt2(ours)) == set(state)
    ours["transformer.seq_layers.0.attention.extra"] = torch.ones(2)
    assert "transformer.seq_layers.0.attention.extra" in gpt2.translate_state_dict_to_hf_gpt2(ours)


def test_a_translation_that_loses_elements_is_refused(solo, monkeypatch):
    solo({"ddp": True})
    with smp.tensor_parallelism():
        model = smp.DistributedModel(_gpt2())
    manager = smp.state.module_manager
    names = model.get_module().state_names
    monkeypatch.setattr(type(names), "part_to_theirs", lambda *_: {})
    with pytest.raises(SMPRuntimeError, match="but 0 under Hugging Face's names"):
        manager.translated(model.state_dict(), model.get_module())


def _partial(path, splits, saves):
    import contextlib

    with smp.tensor_parallelism() if splits else contextlib.nullcontext():
        module = _made("inside", 1 if saves else 9)
    model = smp.DistributedModel(module)
    if saves:
        smp.save_checkpoint(path, tag="parts", model=model)
    else:
        smp.resume_from_checkpoint(path, tag="parts", partial=True, load_optimizer=False)
    if splits:
        return smp.state.module_manager.translated(model.state_dict(), model.get_module())
    return model.state_dict()


def test_a_partial_checkpoint_of_a_model_inside_another_loads_into_the_original(ranks, tmp_path):
    config = {"tensor_parallel_degree": 2, "ddp": True}
    saved = ranks(_partial, 2, str(tmp_path), True, True, config=config)[0]
    loaded = ranks(_partial, 1, str(tmp_path), False, False, config={"ddp": True})[0]
    assert set(saved) == set(loaded)
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())


def test_original_weights_load_where_only_the_model_inside_is_distributed(solo, tmp_path):
    solo({"ddp": True})
    original = _gpt2(tie_word_embeddings=False)
    torch.save(original.state_dict(), tmp_path / "pytorch_model.bin")
    with smp.tensor_parallelism():
        module = _gpt2(tie_word_embeddings=False)
        torch.nn.init.ones_(module.transformer.wpe.weight)
    module.forward = functools.partial(type(module).forward, module)  # which a distributed form would not have
    model = smp.DistributedModel(module)
    assert "transformer.word_embedding.weight" in model.state_dict()
    smp.resume_from_checkpoint(str(tmp_path), tag="pytorch_model.bin", partial=False, load_optimizer=False)
    state = smp.state.module_manager.translated(model.state_dict(), model.get_module())
    for name, value in original.state_dict().items():
        assert torch.equal(state[name], value), name
