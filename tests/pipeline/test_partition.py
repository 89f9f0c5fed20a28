"""Partition decisions: against exhaustive search on random trees, on real models, and the log text."""

from __future__ import annotations

import itertools
import logging
import random

import numpy as np
import pytest
import torch
from torch import nn

from smp_config.schedules import in_flight_counts
from smp_runtime.errors import SMPUserError
from smp_runtime.pipeline.partition.costs import CostModel, CostSettings, balance
from smp_runtime.pipeline.partition.linear_partition import best_cuts
from smp_runtime.pipeline.partition.module_tree import (
    ForeignUse,
    HeldParameter,
    ModuleFlow,
    ModuleNode,
    Trace,
    together_with_reasons,
    tree_without_tracing,
)
from smp_runtime.pipeline.partition.partitioner import partition
from smp_runtime.pipeline.partition.report import describe
from smp_runtime.pipeline.partition.tracing import trace

VOCABULARY = 97


def tree_of(draw: random.Random, most: int, groups: int) -> Trace:
    """A random tree of at most ``most`` modules, some of which share parameters or use those of others."""
    root = ModuleNode("", "Root", calls=1, order=0, flops=draw.uniform(0, 5), activation_bytes=draw.randrange(30))
    nodes, parents = [root], [root]
    for number in range(1, draw.randint(min(4, most - 1), most - 1) + 1):
        parent = draw.choice(parents)
        path = f"{parent.path}.m{number}".lstrip(".")
        node = ModuleNode(path, "M", calls=1, flops=draw.uniform(0, 20) ** 1.5, activation_bytes=draw.randrange(60))
        node.parameters = [
            HeldParameter(f"{path}.w", 10 * size, 40 * size, True) for size in [draw.randint(0, 9)] if size
        ]
        parent.children.append(node)
        nodes.append(node)
        if draw.random() < 0.5:
            parents.append(node)
    for order, node in enumerate(root.walk()):
        node.order = order
    uses = []
    for number in range(groups):
        one, other = draw.sample(nodes[1:], 2)
        if draw.random() < 0.5:
            shared = HeldParameter(f"shared{number}", 20, 80, True)
            one.parameters.append(shared)
            other.parameters.append(shared)
        elif one.parameters:
            uses.append(ForeignUse(other.path, one.path, one.parameters[0].name))
    flows = []
    for _ in range(len(nodes)):
        producer, *consumers = draw.sample(nodes, draw.randint(2, min(4, len(nodes))))
        flows.append(ModuleFlow(producer.path, tuple(node.path for node in consumers), draw.randrange(1, 40)))
    return Trace(root, flows, uses, traced=True)


def post_order(node: ModuleNode) -> list[str]:
    return [path for child in node.children for path in post_order(child)] + [node.path]


def groups_of(found: Trace) -> list[set[str]]:
    """What must be together, overlapping pairs united."""
    groups: list[set[str]] = []
    for paths, _ in together_with_reasons(found):
        united = set(paths).union(*(group for group in groups if group & set(paths)))
        groups = [group for group in groups if not group & united] + [united]
    return groups


def exhaustive(model: CostModel) -> float:
    """The least greatest cost over all cuts of the order of execution and all places of the modules bound together."""
    groups = groups_of(model.trace)
    alone = [path for path in post_order(model.trace.root) if not any(path in group for group in groups)]
    best = float("inf")
    for cuts in itertools.combinations_with_replacement(range(len(alone) + 1), model.stages - 1):
        of = {path: sum(cut <= position for cut in cuts) for position, path in enumerate(alone)}
        for places in itertools.product(range(model.stages), repeat=len(groups)):
            of.update({path: place for group, place in zip(groups, places, strict=True) for path in group})
            full = set(of.values()) == set(range(model.stages))
            if of[""] == model.stages - 1 and full:
                best = min(best, max(cost.cost for cost in model.stage_costs(of.__getitem__)))
    return best


def exhaustive_in_any_order(model: CostModel) -> float:
    """The least greatest cost without traffic when modules may be anywhere, only bound ones together."""
    groups = groups_of(model.trace)
    left = [{path} for path in post_order(model.trace.root) if not any(path in group for group in groups)]
    shares = np.array([sum(model.share(model.needs[path], 1) for path in group) for group in [*groups, *left]])
    places = np.array(list(itertools.product(range(model.stages), repeat=len(shares))))
    return float(np.max([(places == stage) @ shares for stage in range(model.stages)], axis=0).min())


@pytest.mark.parametrize("groups", [0, 1, 2])
def test_within_a_tenth_of_the_best_of_all_cuts(groups):
    ratios = []
    for seed in range(200):
        draw = random.Random(seed)
        stages = draw.choice([2, 2, 3, 4])
        found = tree_of(draw, most=8 - groups // 2, groups=groups)
        settings = CostSettings(
            memory_weight=draw.choice([0.0, 0.2, 0.8, 1.0]),
            in_flight=in_flight_counts("interleaved" if draw.random() < 0.8 else "simple", stages, 4, stages + 2),
            link_operations=draw.choice([0.0, 0.1]),
            round_trip=draw.choice([0.0, 0.1]),
        )
        model = CostModel(found, stages, settings)
        best = exhaustive(model)
        if best == float("inf"):  # bound modules leave too few parts
            continue
        assignment = partition(found, stages, settings)
        for group in groups_of(found):
            assert len({assignment.stage_of(path) for path in group}) == 1
        assert {assignment.stage_of(path) for path in found.nodes()} == set(range(stages))
        ratios.append(max(cost.cost for cost in model.stage_costs(assignment.stage_of)) / best)
    print(f"{len(ratios)} trees, {groups} groups: average {np.mean(ratios):.4f}, worst {max(ratios):.4f}")
    assert len(ratios) > 150
    assert np.mean(ratios) <= 1.02
    assert min(ratios) > 0.9  # a tiny module between two bound ones may go with them, which no cut can do


def test_the_order_of_execution_costs_little():
    """Against every assignment whatsoever, consecutive or not: of work alone, so that only the order restricts."""
    ratios = []
    for seed in range(200):
        draw = random.Random(seed)
        found = tree_of(draw, most=9, groups=seed % 2)
        found.flows.clear()
        stages = draw.choice([2, 3])
        settings = CostSettings(memory_weight=0.2, round_trip=0.0)
        model = CostModel(found, stages, settings)
        assignment = partition(found, stages, settings)
        greatest = max(cost.cost for cost in model.stage_costs(assignment.stage_of))
        ratios.append(greatest / exhaustive_in_any_order(model))
    print(f"any order: average {np.mean(ratios):.4f}, worst {max(ratios):.4f}")
    assert np.mean(ratios) <= 1.10


def test_many_groups_are_placed_well_one_after_the_other(monkeypatch):
    ratios = []
    for seed in range(40):
        found = tree_of(random.Random(seed), most=9, groups=3)
        settings = CostSettings(memory_weight=0.2, round_trip=0.0, link_operations=0.0)
        costs = []
        for most in (256, 1):
            monkeypatch.setattr("smp_runtime.pipeline.partition.partitioner._MOST_PLACEMENTS", most)
            assignment = partition(found, 3, settings)
            costs.append(max(c.cost for c in CostModel(found, 3, settings).stage_costs(assignment.stage_of)))
        ratios.append(costs[1] / costs[0])
    assert np.mean(ratios) < 1.05


def test_cuts_prefer_the_even_among_the_equally_good():
    """One part that is too large decides the greatest cost; the others are still spread."""
    sizes = np.array([0.0, 9, 1, 1, 1, 1]).cumsum()
    costs = np.maximum(sizes[None, :] - sizes[:, None], 0)
    assert best_cuts([costs] * 3, [False] * 3) == (9.0, 89.0, [0, 1, 3])
    assert best_cuts([costs] * 6, [False] * 6) is None
    assert best_cuts([costs] * 6, [True] * 6)[0] == 9.0


# -- models --------------------------------------------------------------------------------------------------------


def tiny(kind: str, layers: int = 4) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = hf.GPT2Config(n_layer=layers, n_embd=32, n_head=4, vocab_size=VOCABULARY, n_positions=32)
        return hf.GPT2LMHeadModel(sizes)
    if kind == "t5":
        sizes = hf.T5Config(
            num_layers=layers, d_model=32, num_heads=4, d_kv=8, d_ff=64, vocab_size=VOCABULARY, decoder_start_token_id=0
        )
        return hf.T5ForConditionalGeneration(sizes)
    common = {"num_hidden_layers": layers, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**common, num_key_value_heads=2, intermediate_size=64))
    bert = hf.BertConfig(**common, intermediate_size=64, max_position_embeddings=32)
    return hf.BertForMaskedLM(bert)


def traced(model: nn.Module) -> Trace:
    ids = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
    return trace(model, lambda: model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)), device="cpu")


@pytest.mark.parametrize("skips_tracing", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(
    ("kind", "tied", "blocks"),
    [
        ("gpt2", ("transformer.wte", "lm_head"), "transformer.h"),
        ("llama", (), "model.layers"),
        ("bert", ("bert.embeddings.word_embeddings", "cls.predictions.decoder"), "bert.encoder.layer"),
        ("t5", ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"), "decoder.block"),
    ],
)
def test_transformers(kind, tied, blocks, stages, skips_tracing):
    model = tiny(kind)
    found = tree_without_tracing(model) if skips_tracing else traced(model)
    settings = CostSettings(0.2, in_flight_counts("interleaved", stages, 4, stages + 2))
    assignment = partition(found, stages, settings)
    assignment.check(model, stages)
    assert len({assignment.stage_of(path) for path in tied}) <= 1
    assert assignment.root_stage == stages - 1
    assert {assignment.stage_of(f"{blocks}.{number}") for number in range(4)} >= set(
        range(stages - (kind == "t5"), stages)
    )
    of_blocks = [assignment.stage_of(f"{blocks}.{number}") for number in range(4)]
    assert of_blocks == sorted(of_blocks)
    costs = CostModel(found, stages, settings).stage_costs(assignment.stage_of)
    assert balance(costs) < 1.35
    assert all(cost.elements for cost in costs)
    assert sum(cost.elements for cost in costs) == sum(parameter.numel() for parameter in model.parameters())
    assert partition(found, stages, settings) == assignment


def test_a_head_is_not_on_an_early_stage():
    """T5's head is bound to an embedding that is called first; backward begins at the head."""
    assignment = partition(traced(tiny("t5")), 2)
    assert assignment.stage_of("lm_head") == 1
    assert assignment.stage_of("encoder.block.0") == 0


def test_blocks_stay_whole():
    assignment = partition(traced(tiny("llama", layers=8)), 4)
    for number in range(8):
        inside = [p for stage in range(4) for p in assignment.paths(stage) if p.startswith(f"model.layers.{number}.")]
        assert len({assignment.stage_of(path) for path in inside}) == 1


def test_a_memory_weight_moves_the_cut():
    model = nn.Sequential(nn.Embedding(5000, 16), *[nn.Linear(16, 16) for _ in range(8)])
    ids = torch.randint(5000, (64, 32))
    found = trace(model, lambda: model(ids), device="cpu")
    by_memory = partition(found, 2, CostSettings(1.0))
    by_work = partition(found, 2, CostSettings(0.0))
    assert len(by_memory.paths(0)) == 1
    assert len(by_work.paths(0)) > 3


def test_activations_in_flight_count():
    """The first stage keeps more microbatches, so it gets fewer layers."""
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(12)])
    found = trace(model, lambda: model(torch.zeros(512, 16)), device="cpu", memory=True)
    even = partition(found, 2, CostSettings(1.0, (1, 1)))
    uneven = partition(found, 2, CostSettings(1.0, (4, 1)))
    assert len(uneven.paths(0)) < len(even.paths(0)) == 6


def test_lists_that_take_turns_are_cut_across():
    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.second = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            for one, other in zip(self.first, self.second, strict=True):
                x = other(one(x))
            return x

    model = Turns()
    assignment = partition(trace(model, lambda: model(torch.zeros(2, 8)), device="cpu"), 2, CostSettings(0.5))
    for number in range(4):
        assert assignment.stage_of(f"first.{number}") == assignment.stage_of(f"second.{number}") == number // 2


def test_a_model_with_too_few_modules_warns_and_works(caplog):
    model = nn.Linear(3, 3)
    with caplog.at_level(logging.WARNING, logger="smp"):
        assignment = partition(tree_without_tracing(model), 3)
    assert "stages 0, 1 have nothing to do: the model has 1 part that can be placed, and there are 3" in caplog.text
    assert assignment.root_stage == 2
    assert assignment.paths(0) == []


def test_a_stage_number_below_one_is_an_error():
    with pytest.raises(SMPUserError, match="number of stages is 0"):
        partition(tree_without_tracing(nn.Linear(2, 2)), 0)


def test_memory_weight_out_of_range():
    with pytest.raises(SMPUserError, match=r"memory_weight is 1\.5; .* from 0 to 1"):
        partition(tree_without_tracing(nn.Linear(2, 2)), 1, CostSettings(1.5))


# -- pins ----------------------------------------------------------------------------------------------------------


def test_pinned_modules_stay_and_the_rest_follows():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6)])
    assignment = partition(tree_without_tracing(model), 3, pinned={"0": 2, "3.1": 0})
    assert [assignment.stage_of(path) for path in ("0", "0.0", "0.1", "3.1")] == [2, 2, 2, 0]
    rest = [assignment.stage_of(str(number)) for number in range(1, 6)]
    assert rest == sorted(rest)
    assert assignment.root_stage == 2


def test_pins_must_not_part_what_belongs_together():
    model = tiny("gpt2")
    with pytest.raises(
        SMPUserError, match="'transformer.wte' and 'lm_head' are set to partitions 0 and 1, but they share"
    ):
        partition(tree_without_tracing(model), 2, pinned={"transformer.wte": 0, "lm_head": 1})
    assert partition(tree_without_tracing(model), 2, pinned={"lm_head": 0}).stage_of("transformer.wte") == 0
    with pytest.raises(SMPUserError, match="set to partition 2, but there are 2 stages, 0 to 1"):
        partition(tree_without_tracing(model), 2, pinned={"lm_head": 2})
    with pytest.raises(SMPUserError, match="names the module 'head'"):
        partition(tree_without_tracing(model), 2, pinned={"head": 0})


def test_everything_pinned_to_one_stage(caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with caplog.at_level(logging.WARNING, logger="smp"):
        assignment = partition(tree_without_tracing(model), 2, pinned={"": 0})
    assert {assignment.stage_of(path) for path in ("", "0", "1")} == {0}
    assert "pin fewer modules" in caplog.text


# -- the log -------------------------------------------------------------------------------------------------------


def test_the_log_shows_a_tree_that_stays_short():
    model = tiny("gpt2", layers=24)
    found = tree_without_tracing(model)
    text = describe(found, partition(found, 4), CostSettings())
    lines = text.splitlines()
    assert lines[0] == "Partition assignments:"
    assert len(lines) < 30
    count = f"{sum(parameter.numel() for parameter in model.parameters()):,}"
    assert any(
        "(model)" in line and "GPT2LMHeadModel" in line and count in line and "0–3, own code 3" in line
        for line in lines
    )
    assert "transformer.h.0–5" in text
    assert "6 × GPT2Block" in text
    assert "together: transformer.wte, lm_head (parameter transformer.wte.weight)" in text
    assert "predicted balance (greatest ÷ mean cost of a stage): 1.0" in text
