"""How a block is split in place: by which plan, what is inferred, and what the proof finds; without ranks."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from support.logs import logged
from support.models import own_blocks
from support.models.own_blocks import PLAN, Net
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.module_conversion.in_place import planning
from smp_runtime.module_conversion.in_place.block_calls import BlockCall
from smp_runtime.module_conversion.in_place.equivalence_check import EquivalenceCheck, NotEqualError
from smp_runtime.module_conversion.in_place.plan_inference import inferred_units, single_units
from smp_runtime.module_conversion.in_place.planning import plan_splits
from smp_runtime.module_conversion.splitting import BlockSplit


@pytest.fixture(autouse=True)
def _session(solo, caplog):
    """Its messages are heard."""
    solo({})
    caplog.set_level(logging.INFO, logger="smp")


def _group(size=2, **settings):
    """The first rank of a group, which decides for all."""
    ranks = SimpleNamespace(rank=0)
    settings = {"prescaled": True, "slices_activations": False, "spreads_experts": False, **settings}
    return SimpleNamespace(size=size, rank=0, ranks=ranks, agree=lambda value: value, **settings)


def _found(net, **settings):
    """Of each block by its name the split, and the lines of the log."""
    names = {id(part): name for name, part in net.named_modules()}
    with logged(logging.INFO) as lines:
        found = plan_splits(net, _group(**settings), lambda part: isinstance(part, nn.Embedding))
    return {names[key]: split for key, split in found.items()}, lines


def _marked(kind="Attention", plan=None):
    net = Net(attention=getattr(own_blocks, kind))
    smp.set_tensor_parallelism(net, plan=plan)
    return net


def test_the_log_says_what_was_chosen_and_why():
    (line,) = _found(_marked(plan=PLAN))[1]
    assert line.startswith("2 × Block (layers.0 to layers.1): the script's plan, 7 of 7 linear maps, 9")
    assert line.endswith("equal to the whole in float64")
    (numbers,) = _found(_marked("Numbered"))[1]
    assert "inferred, 5 of 5" in numbers
    assert "numbers of a rank: attention.n_head, attention.width; equal" in numbers
    (odd,) = _found(_marked("Turned"))[1]
    assert "(attention.projection, attention.o are split one by one: " in odd


def test_what_takes_too_long_to_try_out_is_split_one_by_one(monkeypatch):
    monkeypatch.setattr(planning, "LONGEST", -1.0)
    found, (line,) = _found(_marked("Numbered"))
    assert not found["layers.0"].numbers
    assert not found["layers.0"].leaves["mlp.up"].joins  # the first that was tried
    assert "attention.projection, attention.o are split one by one" in line
    assert "; no more was tried after -1 s" in line


@pytest.mark.parametrize("named", ["head", "layers.*.mlp.gate"])
def test_what_a_model_s_plan_leaves_out_is_inferred(named):
    net = _marked()
    net._tp_plan = {"head": "colwise_gather_output", named: "colwise"}
    found, _ = _found(net)
    assert found.keys() == {"layers.0", "layers.1"}  # and not the model around them
    assert not found["layers.0"].leaves["attention.q"].joins
    assert not found["layers.0"].leaves["mlp.up"].joins


def test_packed_maps_are_split_by_their_pieces():
    how = _found(_marked("Packed"))[0]["layers.0"].leaves
    assert how["attention.projection"].pieces == (16, 16, 16)
    assert not how["attention.o"].columns
    assert how["mlp.packed"].pieces == (24, 24)


def test_keys_of_heads_that_do_not_divide_are_repeated():
    split = _found(_marked("OneKey"))[0]["layers.0"]
    assert split.leaves["attention.projection"].runs == ((0, 8, 16, 20, 20, 24), (8, 16, 16, 20, 20, 24))
    assert set(split.summed) == {"attention.projection.weight", "attention.projection.bias"}
    net = Net(attention=lambda: own_blocks.Grouped(6, 3))
    smp.set_tensor_parallelism(net)
    split = _found(net)[0]["layers.0"]
    assert split.leaves["attention.k"].runs == ((0, 4, 0, 4, 4, 8), (4, 8, 8, 12, 8, 12))
    assert ("attention", "groups", 1) in split.numbers


class _TwoWays(own_blocks.Grouped):
    """As in Transformers 5: without a mask, the kernel finds out how many heads share a key. A norm is used there alone."""

    def forward(self, x, mask=None):
        if mask is not None:
            return super().forward(x, mask)
        q, k, v = (part(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = self.norm(q), self.norm(k)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(attended.transpose(1, 2).flatten(2))


class _Masked(own_blocks.Block):
    def forward(self, x, attention_mask=None):
        return super().forward(x, attention_mask)


class _MaskedNet(Net):
    """A model whose blocks get no mask, unless the script has one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(_Masked(lambda: _TwoWays(4, 1)) for _ in range(2))

    def forward(self, ids, attention_mask=None):
        x = self.embedding(ids)
        for layer in self.layers:
            (x,) = layer(x, attention_mask=attention_mask)
        return self.head(self.norm(x))


def test_numbers_that_attention_reads_with_a_mask_alone_are_those_of_a_rank():
    net = _MaskedNet()
    smp.set_tensor_parallelism(net)
    split = _found(net)[0]["layers.0"]
    assert split.leaves["attention.k"].runs == ((0, 4), (0, 4))
    assert ("attention", "groups", 2) in split.numbers
    assert {"attention.k.weight", "attention.norm.weight"} < set(split.summed)


def test_parameters_that_each_rank_uses_on_its_own_heads_are_summed():
    split = _found(_marked())[0]["layers.0"]
    assert set(split.summed) == {"attention.norm.weight", "attention.norm.bias"}
    assert not _found(_marked("Numbered"))[0]["layers.0"].summed


def test_heads_that_do_not_divide_are_not_torn_apart():
    net = Net(attention=lambda: own_blocks.Attention(heads=3, key_heads=1))
    smp.set_tensor_parallelism(net)
    how = _found(net)[0]["layers.0"].leaves
    assert how["attention.q"].joins
    assert "attention.k" not in how  # not worth a collective of its own
    assert not how["mlp.up"].joins


def test_an_empty_plan_splits_nothing_in_place():
    assert _found(_marked(plan={})) == ({}, [])
    assert _found(_marked(), size=1) == ({}, [])


def test_blocks_that_are_not_marked_stay_as_they_are():
    net = _marked()
    smp.set_tensor_parallelism(net.layers[1], False)
    assert list(_found(net)[0]) == ["layers.0"]


def test_a_block_that_shares_a_weight_with_another_module_stays_whole():
    net = _marked()
    net.layers[1].mlp.up.weight = net.layers[0].mlp.up.weight
    assert _found(net)[0] == {}


class _Scored(own_blocks.Block):
    """It returns a number too, which is no rank's own."""

    def forward(self, x):
        x = super().forward(x)[0]
        return x, x.square().mean()


def test_with_a_batch_per_rank_only_rows_can_be_returned():
    net = nn.Sequential(_Scored())
    smp.set_tensor_parallelism(net)
    assert list(_found(net)[0]) == ["0"]
    found, (line,) = _found(net, prescaled=False)
    assert not found
    assert "what it takes or returns cannot be told apart by its rows" in line


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            {"layers.*.mlp.gate": "colwise", "layers.*.mlp.down": "rowwise"},
            ["a Block (layers.0) over 2 ranks", "mlp.gate"],
        ),
        ({"layers.*.mlp.gates": "colwise"}, ["'layers.*.mlp.gates'", "its linear maps are layers.0.attention.q"]),
        ({"layers.*.first": "colwise"}, ["'layers.0.first', a LayerNorm"]),
    ],
)
def test_a_plan_that_cannot_be_had_is_an_error(plan, words):
    with pytest.raises(ValueError, match="plan") as caught:
        _found(_marked(plan=plan))
    assert all(word in str(caught.value) for word in words), caught.value


def test_styles_are_checked_where_they_are_written():
    with pytest.raises(ValueError, match="'colwize' for 'a', did you mean 'colwise'"):
        smp.set_tensor_parallelism(nn.Linear(2, 2), plan={"a": "colwize"})
    with pytest.raises(ValueError, match="pass a dictionary"):
        smp.set_tensor_parallelism(nn.Linear(2, 2), plan="auto")


def test_the_proof_tells_right_from_wrong_and_leaves_block_and_random_numbers_alone():
    torch.manual_seed(0)
    block, before = own_blocks.Alone(), torch.get_rng_state()
    state = {name: value.clone() for name, value in block.state_dict().items()}
    x = torch.randn(3, 7, own_blocks.WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    proof = EquivalenceCheck(block, BlockCall((x,), {}), 2)
    (right, *_) = single_units(block, ["mlp.gate", "attention.q"])
    assert proof.prove(BlockSplit(right.leaves)).summed == ()
    wrong = {path: type(how)(columns=True) for path, how in right.leaves.items()}
    with pytest.raises(NotEqualError):
        proof.prove(BlockSplit(wrong))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in block.state_dict().items())


class _Doubling(nn.Module):
    """A wrong number of features would go unseen but for the values: it is used for nothing but a scale."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.features = nn.Linear(8, 16), nn.Linear(16, 8), 16

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x))) / self.features


class _Mixing(own_blocks.Alone):
    """It adds to float32, which a block in float64 cannot."""

    def forward(self, x):
        return torch.zeros(x.shape, dtype=torch.float32).index_add_(0, torch.arange(len(x)), super().forward(x))


def test_a_block_that_computes_in_float32_is_tried_in_that():
    net = nn.Sequential(_Mixing())
    smp.set_tensor_parallelism(net)
    found, (line,) = _found(net)
    assert "7 of 7 linear maps" in line
    assert line.endswith("equal to the whole in float32")
    assert not any(how.joins for how in found["0"].leaves.values())


def test_numbers_that_must_stay_whole_do():
    net = _Doubling()
    smp.set_tensor_parallelism(net)
    (split,) = _found(net)[0].values()
    assert set(split.leaves) == {"up", "down"}
    assert not split.numbers


def test_the_units_of_a_long_chain_of_maps_are_not_all_subsets_of_it():
    units = []
    for count in (12, 16):
        chain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
        proof = EquivalenceCheck(chain, BlockCall((torch.ones(2, 4, requires_grad=True),), {}), 2, torch.float64)
        units.append(inferred_units(proof.block, proof.seen))
    assert len(units[1]) - len(units[0]) == 2  # one for each pair of maps more
    assert any(unit.replicated for unit in units[0])  # of those near the beginning
