"""What public scripts rely on although no document says so: each is used as they use it, here or in the test that is named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

TESTS = Path(__file__).parent.parent
#: What scripts use, and the test of it that stands with its subject.
ELSEWHERE = {
    "get_module(), model.module.module.module": "runtime/test_model.py::every_level_of_unwrapping_leads_to_the_module",
    "register_post_step_hook": "runtime/test_model.py::test_hooks",
    "a step function without self in a class": "runtime/test_step.py::a_step_in_a_class_body_may_be_a_method_or_not",
    "set_partition after wrapping": "pipeline/test_assignment.py::set_partition",
    "the optimizer is one of PyTorch, to schedulers": "runtime/test_optimizer.py::schedulers_change_the_learning_rate_that_is_used",
    "step_was_skipped": "runtime/test_optimizer.py::accelerate_takes_the_optimizer_as_prepared",
    "ds_shape, ds_numel, ds_tensor, fp16_groups": "sharding/test_state.py::attributes_that_scripts_read",
    "replacement at degree 1": "tensor_parallel/test_replacement.py::one_rank_is_enough_when_a_scope_asks",
    "translate_functions": "tensor_parallel/test_parts.py::every_alias_of_the_translations",
    "model_0.pt, partition_count, fp32_flat_groups": "checkpoints/test_model_features.py::flat_groups_are_what_tools",
    "an empty user_content.pt": "checkpoints/test_partial_and_full.py::an_empty_user_content_is_tolerated_where_nothing_is_lost",
    "weights of Transformers without newest": "checkpoints/test_transformers_format.py::every_layout_is_read",
    'init_process_group("smddp") without an import': "smddp/test_jobs.py::unmodified_ddp_and_fsdp2_scripts",
    "older fp16 helpers": "checkpoints/test_model_features.py::names_that_older_helper_scripts_read",
    "layers of AWS's samples": "tensor_parallel/test_gpt2_blocks.py::test_",
}


@pytest.mark.parametrize("used", ELSEWHERE)
def test_it_is_tested_with_its_subject(used):
    file, name = ELSEWHERE[used].split("::")
    tree = ast.parse((TESTS / file).read_text())
    assert any(name in node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), ELSEWHERE[used]


@pytest.mark.parametrize(
    "setting",
    [
        {"fast_mode": True},
        {"static_mode": True},
        {"checkpoint_attentions": True},
        {"_match_weights": True},
        {"_fp32_grad_accumulation": True},
        {"_prescaled_batch": True},
        {"overlapping_allreduce": False},
        {"tracing_rank": 0},
        {"contiguous": False},
        {"horovod": False},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_that_configurations_of_samples_have(solo, setting):
    solo(setting)
    name, value = next(iter(setting.items()))
    read = {"_prescaled_batch": "prescaled_batch"}.get(name, name.removeprefix("_"))
    cfg = smp.state.cfg
    assert getattr(cfg, name, getattr(cfg, read, None)) == value
    model = smp.DistributedModel(nn.Linear(3, 2))
    smp.step(lambda x: model.backward(model(x).sum()))(torch.ones(2, 3))
    assert model.module.weight.grad is not None


def _groups_and_messages():
    mine = {"tp": smp.get_tp_group(), "pp": smp.get_pp_group(), "rdp": smp.get_rdp_group()}
    assert {kind: len(group) for kind, group in mine.items()} == {
        "tp": smp.tp_size(),
        "pp": smp.pp_size(),
        "rdp": smp.rdp_size(),
    }
    heard = {}
    for kind, rank_type in (
        ("tp", smp.RankType.TP_RANK),
        ("pp", smp.RankType.PP_RANK),
        ("rdp", smp.RankType.RDP_RANK),
    ):
        position, size = getattr(smp, f"{kind}_rank")(), getattr(smp, f"{kind}_size")()
        if size < 2:
            continue
        if position == 0:
            smp.send({"from": smp.rank()}, 1, rank_type)
        else:
            heard[kind] = smp.recv_from(0, rank_type)["from"] == mine[kind][0]
    return heard


def test_groups_and_ranks_of_every_kind(ranks):
    stages = {"pipeline_parallel_degree": 2, "ddp": True}
    found = ranks(_groups_and_messages, 4, config=stages)
    assert [sorted(kinds) for kinds in found] == [[], ["pp"], ["rdp"], ["pp", "rdp"]]
    assert all(all(kinds.values()) for kinds in found)
    found = ranks(_groups_and_messages, 4, config={"tensor_parallel_degree": 2, "ddp": True})
    assert [sorted(kinds) for kinds in found] == [[], ["tp"], ["rdp"], ["rdp", "tp"]]
    assert all(all(kinds.values()) for kinds in found)


def test_values_that_are_no_tensors_come_as_a_list(solo):
    solo({"microbatches": 2})

    @smp.step
    def step(x):
        return {"loss": x.mean().requires_grad_(), "name": "a", "sizes": [len(x)]}

    found = step(torch.arange(4.0))
    assert found["name"] == ["a", "a"]
    loss = found["loss"].detach().reduce_mean()
    assert (float(loss), loss.requires_grad) == (1.5, False)


def test_what_the_optimizer_updates_has_the_models_names(solo):
    """Scripts build their groups with and without weight decay from it."""
    solo({"bf16": True})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    named = dict(model.virtual_named_parameters())
    assert named.keys() == dict(model.named_parameters()).keys()
    assert {id(p) for p in named.values()} == {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert optimizer._is_accelerate_prepared
    assert isinstance(model, smp.model.DistributedModel)


@pytest.mark.parametrize(
    "keyword",
    [
        "attention_in_fp32",
        *(
            pytest.param(other, marks=pytest.mark.full)
            for other in (
                "query_key_layer_scaling",
                "fused_softmax",
                "fused_dropout",
                "fused_bias_gelu",
                "distribute_embedding",
                "use_alibi",
                "fp32_residual_addition",
                "flash_attention",
                "zero_init",
            )
        ),
    ],
)
def test_keywords_of_tensor_parallelism(solo, keyword):
    """As the samples pass them, around a model of Transformers that is made with the others off."""
    import transformers as hf

    solo({"ddp": True})
    config = hf.GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    with smp.model_creation(tensor_parallelism=True, dtype=torch.float32, **{keyword: True}):
        model = hf.AutoModelForCausalLM.from_config(config)
    model = smp.DistributedModel(model, trace_device="gpu")
    layers = model.get_module().transformer.seq_layers
    assert isinstance(layers, nn.Sequential)
    smp.set_activation_checkpointing(layers, pack_args_as_tuple=True, strategy="each")
    for layer in layers.children():
        assert isinstance(layer.attention, smp.nn.DistributedAttentionLayer)
        assert isinstance(layer.output, smp.nn.DistributedTransformerOutputLayer)
    ids = torch.arange(8)[None]

    @smp.step
    def step(ids):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)["loss"]
        model.backward(loss)
        return loss

    assert torch.isfinite(step(ids).reduce_mean())
    assert all(p.grad is not None for p in layers.parameters())
