"""Ranks and groups: every documented example, and the laws that hold for all of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.matrix import examples

from smp_config import ConfigError, Coordinates, Group, Topology


def _coordinates(topology):
    return [
        "".join(str(x) for x in (at.rdp, at.pp, at.tp)) for at in map(topology.coordinates, range(topology.world_size))
    ]


def test_eight_ranks_cluster_with_tensor_and_pipeline():
    # Documented table: (rdp, pp, tp) of ranks 0 to 7.
    assert _coordinates(Topology(8, pipeline=2, tensor=2)) == "000 001 010 011 100 101 110 111".split()


def test_eight_ranks_ptd():
    # Documented table for "PTD", as (rdp, pp, tp).
    topology = Topology(8, pipeline=2, tensor=2, placement="PTD")
    assert _coordinates(topology) == "000 100 001 101 010 110 011 111".split()


def test_the_developer_guides_picture_is_dtp():
    topology = Topology(8, pipeline=2, tensor=2, placement="DTP")
    assert [0, 1] in topology.groups(Group.PP)
    assert [0, 2] in topology.groups(Group.TP)


def test_eight_ranks_two_stages_without_tensor():
    cluster = Topology(8, pipeline=2)
    assert cluster.groups(Group.MP) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cluster.groups(Group.DP) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    spread = Topology(8, pipeline=2, placement="TPD")
    assert spread.groups(Group.MP) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert spread.groups(Group.DP) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert spread.rank_in(Group.DP, 6) == 2
    assert [spread.rank_in(Group.MP, r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_thirty_two_gpus_tensor_four_sharding_four():
    topology = Topology(32, tensor=4, sharded=4)
    assert topology.groups(Group.TP) == [list(range(i, i + 4)) for i in range(0, 32, 4)]
    assert topology.group_of(Group.RDP, 0) == [0, 4, 8, 12, 16, 20, 24, 28]
    topology.group_of(Group.SHARD, 0).clear()  # the caller's own
    assert topology.group_of(Group.SHARD, 0) == [0, 4, 8, 12]
    assert topology.group_of(Group.SHARD, 16) == [16, 20, 24, 28]
    # TPG0 and TPG4 replicate each other, as do SDPG0 and SDPG4: pairs 16 ranks apart.
    assert topology.groups(Group.REPLICA) == [[i, i + 16] for i in range(16)]
    assert topology.size(Group.SHARD) == 4
    assert topology.size(Group.REPLICA) == 2


def test_fifteen_hundred_thirty_six_gpus():
    alone = Topology(1536, sharded=32)
    assert alone.size(Group.DP) == 1536
    assert alone.global_batch(1, prescaled=False) == 1536
    assert alone.global_batch(1, prescaled=False) * 4096 == 6_291_456
    with_tensor = Topology(1536, tensor=8, sharded=32)
    assert len(with_tensor.groups(Group.TP)) == 192
    assert with_tensor.global_batch(4, prescaled=True) == 768
    assert with_tensor.global_batch(4, prescaled=True) * 4096 == 3_145_728
    assert with_tensor.size(Group.REPLICA) == 6


def test_one_host_with_two_stages_gives_four_replicas():
    assert Topology(8, pipeline=2).size(Group.DP) == 4


PLACEMENTS = ["".join(p) for p in itertools.permutations("DPT")]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_right_most_letter_varies_fastest(placement):
    topology = Topology(24, pipeline=2, tensor=3, placement=placement)
    axis = {"P": "pp", "T": "tp", "D": "rdp"}[placement[-1]]
    first, second = topology.coordinates(0), topology.coordinates(1)
    assert getattr(second, axis) == getattr(first, axis) + 1


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from(PLACEMENTS),
    st.integers(1, 3),
    st.integers(1, 3),
)
@settings(max_examples=examples(20, 100), deadline=None)
def test_laws_of_every_topology(pp, tp, sharded, replicas, placement, ep, cp):
    replicas *= cp
    world = pp * tp * sharded * replicas * ep
    topology = Topology(world, pipeline=pp, tensor=tp, sharded=sharded, placement=placement, expert=ep, context=cp)
    assert topology.size(Group.MP) * topology.size(Group.RDP) == world
    assert topology.size(Group.PP) * topology.size(Group.DP) == world
    assert pp * tp * topology.size(Group.RDP) == world
    for kind in Group:
        groups = topology.groups(kind)
        assert sorted(itertools.chain(*groups)) == list(range(world))
        assert all(members == sorted(members) and len(members) == topology.size(kind) for members in groups)
        for members in groups:
            assert [topology.rank_in(kind, rank) for rank in members] == list(range(len(members)))
    for rank in range(world):
        assert topology.rank_at(topology.coordinates(rank)) == rank
    assert len({topology.coordinates(rank) for rank in range(world)}) == world
    # Members of an RDP group agree in pipeline and tensor coordinates; those with the same experts are every ep-th of it, and
    # those of a shard group a run of these.
    for members in topology.groups(Group.SHARD):
        rdp = topology.group_of(Group.EXPERT_RDP, members[0])
        start = rdp.index(members[0])
        assert rdp[start : start + sharded] == members
        whole = topology.group_of(Group.RDP, members[0])
        assert rdp == whole[whole.index(members[0]) % ep :: ep]
    # Ranks that share sequences out are neighbors among those with the same parameters; scripts count one of them each.
    for members in topology.groups(Group.CONTEXT):
        whole = topology.group_of(Group.RDP, members[0])
        start = whole.index(members[0])
        assert start % cp == 0
        assert whole[start : start + cp] == members
        assert len({topology.rank_in(Group.BATCH_RDP, rank) for rank in members}) == 1
        assert len({topology.rank_in(Group.BATCH_DP, rank) for rank in members}) == 1
    assert topology.size(Group.BATCH_RDP) * cp == topology.size(Group.RDP)
    assert topology.global_batch(3, prescaled=False) == 3 * topology.size(Group.BATCH_DP)
    # Ranks that hold the same shard of what is no expert: one of each group that shares experts out, or its whole group.
    for members in topology.groups(Group.REPLICA):
        shares = {tuple(topology.group_of(Group.EP, rank)) for rank in members}
        assert sorted(itertools.chain(*shares)) == members
        assert sorted(itertools.chain(*{tuple(topology.group_of(Group.EXPERT_REPLICA, r)) for r in members})) == members


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"world_size": 2, "pipeline": 4}, "start at least 4 processes"),
        ({"world_size": 8, "pipeline": 3}, "use 6 processes"),
        ({"world_size": 8, "tensor": 2, "sharded": 3}, "use one of 1, 2, 4"),
        ({"world_size": 8, "tensor": 2, "context": 3}, "context_parallel_degree is 3"),
        ({"world_size": 4, "context": 8}, "use one of 1, 2, 4"),
        ({"world_size": 8, "pipeline": 0}, "at least 1"),
        ({"world_size": 8, "placement": "XYZ"}, "permutation"),
    ],
)
def test_degrees_that_do_not_fit(arguments, says):
    with pytest.raises(ConfigError) as error:
        Topology(**arguments)
    assert says in str(error.value)


def test_a_rank_that_does_not_exist():
    with pytest.raises(ConfigError, match="ranks 0 to 7"):
        Topology(8).coordinates(8)
    assert Topology(8, pipeline=2).rank_at(Coordinates(pp=1, tp=0, rdp=3)) == 7
