"""Sizes of the SMDDP all-gather's buffers, against the numbers of its public page."""

from __future__ import annotations

import pytest

from smp_config.errors import ConfigError
from smp_config.smddp import SCRATCH_VARIABLE, SORT_VARIABLE, BufferSizes, host_rows

MIB = 1024 * 1024


def test_defaults():
    assert BufferSizes.from_environment({}) == BufferSizes(16 * MIB, 128 * MIB)
    assert BufferSizes().to_environment() == {SCRATCH_VARIABLE: "16777216", SORT_VARIABLE: "134217728"}


def test_the_first_source_wins():
    sizes = BufferSizes.from_environment(
        {SCRATCH_VARIABLE: "8192"}, {SCRATCH_VARIABLE: "16384", SORT_VARIABLE: "16384"}
    )
    assert sizes == BufferSizes(8192, 16384)


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("8193", "set it to 8192 or 16384"),
        ("100000", "set it to 98304 or 106496"),
        ("4096", "set it to 8192 ("),
        ("0", "set it to 8192 ("),
        ("-8192", "-8192 ≤ 0"),
        ("16MB", "'16MB', not a whole number"),
        ("", "'', not a whole number"),
    ],
)
@pytest.mark.parametrize("variable", [SCRATCH_VARIABLE, SORT_VARIABLE])
def test_wrong_sizes_name_variable_value_and_the_nearest(variable, value, part):
    with pytest.raises(ConfigError) as caught:
        BufferSizes.from_environment({variable: value})
    assert variable in str(caught.value)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("scratch", "sort", "input_bytes", "degree", "implementation", "fits"),
    [
        (16 * MIB, 128 * MIB, 16 * MIB, 64, 0, True),  # both exactly full
        (16 * MIB, 128 * MIB, 16 * MIB + 1, 8, 0, False),  # scratch
        (16 * MIB, 128 * MIB, 16 * MIB, 65, 0, False),  # sort: 65 · 16 MiB / 8 > 128 MiB
        (8192, 8192, 8192, 8, 0, True),
        (8192, 8192, 8192, 9, 0, False),
        (8192, 8192, 8192, 2, 8192, True),
        (8192, 8192, 8192, 2, 8193, False),  # the implementation needs more than the documented rule
    ],
)
def test_the_fallback_rule(scratch, sort, input_bytes, degree, implementation, fits):
    reason = BufferSizes(scratch, sort).fallback_reason(input_bytes, degree, implementation)
    assert (reason is None) == fits


def test_the_reason_tells_the_sizes_and_what_would_fit():
    reason = BufferSizes(8192, 8192).fallback_reason(10_000, 2)
    assert reason is not None
    assert all(part in reason for part in ("10000", f"{SCRATCH_VARIABLE}=8192", "16384"))
    reason = BufferSizes(16384, 8192).fallback_reason(16384, 16)
    assert reason is not None
    assert all(part in reason for part in ("32768", f"{SORT_VARIABLE}=8192"))


@pytest.mark.parametrize(
    ("shard", "hosts", "ranks_per_host", "pieces"),
    [
        (16 * MIB, 2, 8, 1),  # as it is
        (16 * MIB + 1, 2, 8, 2),
        (56_650_752, 2, 8, 5),  # a layer of NeoX-20B over 16 GPUs
        (28_325_376, 4, 8, 3),  # over 32
        (56_650_752, 16, 8, 11),  # more hosts leave less of the sort buffer
        (56_650_752, 2, 4, 4),
    ],
)
def test_each_piece_of_a_large_shard_fits(shard, hosts, ranks_per_host, pieces):
    sizes = BufferSizes()
    assert sizes.pieces(shard, hosts, ranks_per_host) == pieces
    piece = sizes.piece_bytes(shard, hosts, ranks_per_host)
    assert sizes.fallback_reason(piece, hosts * ranks_per_host, hosts * piece) is None
    assert pieces == 1 or (hosts + ranks_per_host) * piece <= sizes.sort
    assert pieces * piece >= shard > (pieces - 1) * piece


def test_a_shard_goes_in_64_pieces_at_most():
    small = BufferSizes(8192, 8192)
    assert (small.pieces(64 * 2048, 2, 2), small.piece_bytes(64 * 2048, 2, 2)) == (64, 2048)
    assert (small.pieces(64 * 2048 + 1, 2, 2), small.piece_bytes(64 * 2048 + 1, 2, 2)) == (0, 0)
    assert small.pieces(10_000, 64, 65) == 0  # not even a piece of 64 bytes fits


def test_rows_of_hosts_or_why_there_are_none():
    assert host_rows([0, 0, 1, 1]) == ((0, 1), (2, 3))
    assert host_rows([1, 0, 1, 0]) == ((0, 2), (1, 3))
    assert host_rows([3, 3]) == "all 2 ranks of the group are on one host, 3"


@pytest.mark.parametrize(("scratch", "sort"), [(8192, 128 * MIB), (16 * MIB, 8 * 8192), (8192, 8192)])
@pytest.mark.parametrize(
    ("shard", "hosts", "ranks_per_host"),
    [(56_623_104, 2, 8), (28_325_376, 4, 8), (56_623_104, 16, 8), (999_999_999, 2, 2)],
)
def test_the_sizes_that_are_named_are_the_least_for_pieces(scratch, sort, shard, hosts, ranks_per_host):
    reason = BufferSizes(scratch, sort).pieces_reason(shard, hosts, ranks_per_host)
    named = reason.partition("; ")[2]
    names = ("SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", "SMDDP_AG_SORT_BUFFER_SIZE_BYTES")
    # A buffer that is large enough is not spoken of.
    assert [name in named for name in names] == [scratch == 8192, sort < 128 * MIB]
    found = {name: int(size) for name, _, size in (word.partition("=") for word in named.split() if "=" in word)}
    enough = BufferSizes(*(found.get(name, now) for name, now in zip(names, (scratch, sort), strict=True)))
    assert enough.pieces_reason(shard, hosts, ranks_per_host) is None
    assert 50 <= enough.pieces(shard, hosts, ranks_per_host) <= 64
    for name in found:
        less = {**found, name: found[name] - 8192}
        short = BufferSizes(*(less.get(each, now) for each, now in zip(names, (scratch, sort), strict=True)))
        assert short.pieces(shard, hosts, ranks_per_host) == 0
