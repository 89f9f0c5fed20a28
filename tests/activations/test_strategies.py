"""How children are put together to regions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.activations.functional import Strategy, group_neighbours
from smp_runtime.activations.marking import recomputed_parts
from smp_runtime.errors import SMPUserError
from smp_runtime.pipeline.partition.module_tree import note_recomputed
from smp_runtime.pipeline.partition.tracing import trace


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("each", [(0, "a"), (0, "b"), (0, "c"), (1, "d"), (1, "e"), (None, "f"), (None, "g"), (0, "h")]),
        ("contiguous", [(0, "abc"), (1, "de"), (None, "f"), (None, "g"), (0, "h")]),
        ("group_2", [(0, "ab"), (0, "c"), (1, "de"), (None, "f"), (None, "g"), (0, "h")]),
        ("group_9", [(0, "abc"), (1, "de"), (None, "f"), (None, "g"), (0, "h")]),
    ],
)
def test_groups_end_where_the_stage_changes(name, expected):
    groups = group_neighbours("abcdefgh", [0, 0, 0, 1, 1, None, None, 0], Strategy.parse(name))
    assert [(stage, "".join(members)) for stage, members in groups] == expected


@pytest.mark.parametrize("name", ["all", "group_", "group_x", "", None, 4])
def test_an_unknown_strategy(name):
    with pytest.raises(SMPUserError, match="none of the checkpointing strategies: use 'each'"):
        Strategy.parse(name)


@pytest.mark.parametrize("name", ["group_0", "group_-2"])
def test_a_group_without_members(name):
    with pytest.raises(SMPUserError, match="at least one child; use 'group_1'"):
        Strategy.parse(name)


def test_what_is_recomputed_and_what_of_it_keeps_its_inputs():
    def layers(count):
        return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))

    model = nn.Module()
    model.each, model.groups, model.all, model.plain = layers(2), layers(5), layers(3), layers(2)
    model.outer = nn.Sequential(layers(2))
    smp.set_activation_checkpointing(model.each)
    smp.set_activation_checkpointing(model.groups, strategy="group_2")
    smp.set_activation_checkpointing(model.all, strategy="contiguous")
    smp.set_activation_checkpointing(model.outer[0][1])
    smp.set_activation_checkpointing(model.outer)  # its child, which holds the one before
    kept = {**{f"each.{i}": True for i in range(2)}, "outer.0": True}
    kept |= {f"groups.{i}": i in (0, 2, 4) for i in range(5)} | {f"all.{i}": i == 0 for i in range(3)}
    assert recomputed_parts(model) == kept
    root = layers(2)
    smp.set_activation_checkpointing(root, strategy="group_2")
    assert recomputed_parts(root) == {"0": True, "1": False}


def test_a_partition_counts_checkpointed_layers_with_their_inputs_only():
    wide = nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8))
    model = nn.Sequential(wide, nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)))
    seen = trace(model, lambda: model(torch.ones(64, 8)), device="cpu")
    before = {path: (node.activation_bytes, node.flops) for path, node in seen.nodes().items()}
    note_recomputed(seen, {"0": True})
    after = seen.nodes()
    assert after["0"].activation_bytes == 64 * 8 * 4
    assert after["0.0"].activation_bytes == after["0.2"].activation_bytes == 0
    assert after["0.0"].flops == pytest.approx(before["0.0"][1] * 4 / 3)
    assert all((after[p].activation_bytes, after[p].flops) == before[p] for p in ("", "1", "1.0", "1.1", "1.2"))
    note_recomputed(seen, {"1": False})
    assert sum(node.activation_bytes for node in after["1"].walk()) == 0
