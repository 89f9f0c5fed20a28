"""``save_pretrained`` of a wrapped model, at any topology: what Transformers would have written for the whole one."""

from __future__ import annotations

import json

import pytest
import torch

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import CheckpointError, SMPUserError

TOPOLOGIES = {
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "pp2": (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    "pp2 tp2": (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "microbatches": 2}),
    "sharded 2": (2, {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 20}),
    "tp2 in shards": (4, {"tensor_parallel_degree": 2, "prescaled_batch": True, "sharded_data_parallel_degree": 2,
                          "sdp_param_persistence_threshold": 20}),
    "sharded 2 of 4": (4, {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 20}),
}  # fmt: skip
SAMPLE = {"pp2 tp2", "tp2 in shards"}


def _original(tied=True):
    import transformers as hf

    torch.manual_seed(1)
    quiet = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    config = hf.GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=16, vocab_size=43, bos_token_id=1, eos_token_id=1,
                           tie_word_embeddings=tied, **quiet)  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def _saved(folder, **options):
    """Train a step, save in both ways, and give back the state in whole and what was alive while saving."""
    model = smp.DistributedModel(_marked(_original()))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    @smp.step
    def step(ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    step(torch.randint(43, (4, 8), generator=torch.Generator().manual_seed(3)))
    optimizer.step()
    model.save_pretrained(f"{folder}/wrapped")
    model.module.save_pretrained(f"{folder}/module", max_shard_size="20KB", **options)
    smp.save_checkpoint(f"{folder}/full", tag="model.safetensors", partial=False)
    return {name: value.clone() for name, value in model.state_dict().items()}


def _marked(module):
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(module)
    return module


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in SAMPLE else pytest.mark.full) for c in TOPOLOGIES])
def test_what_was_trained_is_saved_as_one_process_has_it(ranks, tmp_path, case):
    from transformers import AutoModelForCausalLM

    from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_state_dict_to_hf_gpt2

    size, config = TOPOLOGIES[case]
    state = ranks(_saved, size, str(tmp_path), config={"ddp": True, **config}, timeout=100)[0]
    if "tp2" in case:
        state = translate_state_dict_to_hf_gpt2(state)
    for place in ("wrapped", "module", "full"):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / place)
        assert found.lm_head.weight is found.transformer.wte.weight
        for name, value in found.state_dict().items():
            assert torch.equal(value, state[name]), (place, name)
        assert json.loads((tmp_path / place / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    assert not torch.equal(state["transformer.wte.weight"], _original().transformer.wte.weight)
    assert (tmp_path / "module" / "model.safetensors.index.json").exists()
    assert (tmp_path / "wrapped" / "generation_config.json").exists()


def _most_alive():
    """Elements of whole tensors that rank 0 has at once, and of all that it writes."""
    import weakref

    from smp_runtime.checkpoint import export

    model = smp.DistributedModel(_original(tied=False))
    alive, most = 0, 0

    def gone(elements):
        nonlocal alive
        alive -= elements

    original = model.whole_tensors

    def watched():
        nonlocal alive, most
        described, stream = original()

        def watch():
            nonlocal alive, most
            for name, value in stream:
                alive += value.numel()
                weakref.finalize(value, gone, value.numel())
                most = max(most, alive)
                yield name, value
                del value

        return described, watch()

    model.whole_tensors = watched
    written = []
    export.write_streamed(
        model, dict, lambda planned: written.extend(planned[1](v).numel() for v in planned[0].values())
    )
    return most, sum(written)


def test_no_more_than_a_flat_unit_is_in_memory(ranks):
    config = {"ddp": True, **TOPOLOGIES["sharded 2"][1]}
    most, written = ranks(_most_alive, 2, config=config)[0]
    original = _original(tied=False)
    assert written == sum(p.numel() for p in original.parameters())
    layer = sum(p.numel() for p in original.transformer.h[0].parameters())  # each is a flat unit
    assert most <= layer < written / 2, (most, layer, written)


def _cannot_write(folder):
    with open(f"{folder}/file", "a"):
        pass
    model = smp.DistributedModel(_marked(_original()))
    with pytest.raises(CheckpointError, match="rank 0.*(Not a directory|File exists)"):
        model.save_pretrained(f"{folder}/file")
    with pytest.raises(SMPUserError, match="push_to_hub"):
        model.save_pretrained(folder, push_to_hub=True)
    with pytest.raises(SMPUserError, match="5 apples"):
        model.save_pretrained(folder, state_dict={}, max_shard_size="5 apples")
    state = model.state_dict()
    if smp.rank() == 0:  # a state of its own needs nobody else
        model.module.save_pretrained(f"{folder}/given", state_dict=state)
    model.save_pretrained(f"{folder}/own")


def test_a_rank_that_cannot_write_is_heard_on_all(ranks, tmp_path):
    from safetensors.torch import load_file

    ranks(_cannot_write, 2, str(tmp_path), config={"ddp": True, "tensor_parallel_degree": 2})
    given, own = (load_file(tmp_path / name / "model.safetensors") for name in ("given", "own"))
    assert given.keys() == own.keys()
    assert all(torch.equal(value, own[name]) for name, value in given.items())


def test_one_process_saves_by_itself(solo, tmp_path):
    import copy

    from transformers import AutoModelForCausalLM

    solo({"ddp": True})
    original = _original()
    expected = {name: value.clone() for name, value in original.state_dict().items()}
    smp.set_tensor_parallelism(original)
    model = smp.DistributedModel(original)
    model.module.save_pretrained(tmp_path, safe_serialization=False)
    found = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    plain = smp.DistributedModel(_original())
    assert "save_pretrained" not in vars(plain.module)  # Transformers' own does it
    copied = copy.deepcopy(model.module)
    with pytest.raises(AttributeError):  # the class of a distributed model has none
        copied.save_pretrained(tmp_path)


def _saves_where_batches_are_read(folder):
    model = smp.DistributedModel(_original())
    if smp.dp_rank() == 0:  # on all ranks that share sequences out
        model.save_pretrained(f"{folder}/{smp.rank()}", True)


def test_one_of_the_ranks_that_share_sequences_out_writes(ranks, tmp_path):
    from safetensors.torch import load_file

    pytest.importorskip("transformers")
    ranks(_saves_where_batches_are_read, 2, str(tmp_path), config={"ddp": True, "context_parallel_degree": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    saved, original = load_file(tmp_path / "0" / "model.safetensors"), _original().state_dict()
    assert all(torch.equal(value, original[name]) for name, value in saved.items())
