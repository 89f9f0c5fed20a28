"""Attention of ranks that share a sequence out is attention over the whole sequence, under any mask."""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from support import matrix
from support.matrix import sampled
from support.models.attention_cases import (
    MASKS,
    TOLERANCE,
    Group,
    compare_all,
    differences,
    random_numbers,
    small_tiles,
    train_once,
)

from smp_runtime.context.attention import (
    METHODS,
    attend,
    attend_with_logsumexp,
    balance_documents,
    fused,
    zigzag_indices,
)
from smp_runtime.context.attention.scores import PositionalDropout
from smp_runtime.context.attention.traffic import counters_of


def _compare(seeds, whole):
    return compare_all(seeds, whole)


CASES = [(ranks, seed) for ranks in (2, 3, 4) for seed in range(0, 300, 20)]


@pytest.mark.parametrize(("size", "first"), sampled(CASES, [(4, 0)]))
def test_attention_over_ranks_is_attention_over_the_whole(ranks, size, first):
    # A case of each mask, or all: numbers of cases and of masks have no common factor.
    seeds = range(first, first + (20 if matrix.is_whole else len(MASKS)))
    for results in ranks(_compare, size, seeds, matrix.is_whole, timeout=600):
        for (seed, method, dtype), difference in results.items():
            assert difference <= TOLERANCE[dtype], (seed, method, dtype, difference)


def _sent(method, causal, window):
    """Bytes that this rank sends in both passes, and pairs that it computes."""
    group = Group.whole()
    batch, heads, key_heads, length, width = 2, 8, 4, 64, 16
    index = zigzag_indices(length, group.size) if causal else list(torch.arange(length).tensor_split(group.size))
    inputs = [random_numbers(batch, count, length, width) for count in (heads, key_heads, key_heads)]
    row, key = torch.arange(length)[:, None], torch.arange(length)
    mask = ((key <= row) & (key > row - window))[index[group.rank]] if window else None
    options = {"method": method, "causal": causal, "grouped": True, "mask": mask}
    train_once(group, index, inputs, random_numbers(batch, heads, length, width), **options)
    counted = counters_of(group)
    return counted.sent, counted.masks, counted.scores


def test_bytes_are_those_of_the_closed_forms(ranks):
    size, batch, heads, key_heads, length, width, element = 4, 2, 8, 4, 64, 16, 8
    others = (size - 1) / size
    keys = 2 * others * batch * length * key_heads * width * element
    of_heads = (2 * heads + 2 * key_heads) * others / size * batch * length * width * element
    forms = {"ring": 3 * keys, "all_gather": 3 * keys, "all_to_all": 2 * of_heads, "auto": 2 * of_heads}
    for method, form in forms.items():
        sent = [each for each, _, _ in ranks(_sent, size, method, False, 0)]
        assert max(sent) <= 1.02 * form, method
        assert min(sent) == max(sent), method  # so that none is counted short


def test_what_a_mask_hides_is_neither_sent_nor_computed(ranks):
    size, length, window = 4, 64, 9
    row = 2 * 4 * 16 * 8 * 2  # bytes of a position's keys and values: batch, heads, width, element
    for method in ("ring", "all_gather"):
        results = ranks(_sent, size, method, False, window)
        # Each rank but the last sends the end of its chunk, twice; each but the first returns gradients.
        assert [sent for sent, _, _ in results] == [part * (window - 1) * row for part in (2, 3, 3, 1)]
        assert all(masks == (size - 1) * length for _, masks, _ in results)
    for sent, masks, scores in ranks(_sent, size, "ring", True, 0):
        assert masks == 0
        assert sent < 3 * (size - 1) * length / size * row
        # Half of the square, and a rank's share of it.
        assert scores == pytest.approx(length * (length + 1) / 2 / size, rel=0.02)


def _documents(lengths):
    group = Group.whole()
    index = balance_documents(lengths, group.size)
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mine = index[group.rank]
    mask = (number[mine, None] == number) & (mine[:, None] >= torch.arange(len(number)))
    inputs = [random_numbers(1, 1, len(number), 4, dtype=torch.float32)] * 3
    with small_tiles(32, 64):
        train_once(group, index, inputs, inputs[0], mask=mask, method="ring")
    return counters_of(group).scores, int(mask.sum())


def test_work_is_equal(ranks):
    for ranks_number in (2, 4, 8):
        for length in (4096, 5003):
            work = [float((held + 1).sum()) for held in zigzag_indices(length, ranks_number)]
            assert max(work) <= 1.02 * sum(work) / ranks_number
    draw = random.Random(5)
    lengths = [draw.choice([draw.randint(1, 120), draw.randint(1, 16)]) for _ in range(64)]
    results = ranks(_documents, 4, lengths)
    for place in range(2):  # computed, and asked for
        work = [each[place] for each in results]
        assert max(work) <= 1.1 * sum(work) / len(work)
    for lengths in ([], [1], [3, 1]):  # fewer tokens than ranks
        assert sorted(torch.cat(balance_documents(lengths, 3)).tolist()) == list(range(sum(lengths)))


def _drop(methods):
    group = Group.whole()
    length, heads = 24, 4
    inputs = [random_numbers(2, heads, length, 8, seed=each) for each in range(3)]
    above = random_numbers(2, heads, length, 8, seed=3)
    options = {"causal": True, "dropout": 0.3, "dropout_seed": 2**40 + 7}
    alone = train_once(Group.alone(), [torch.arange(length)], inputs, above, **options)
    index = zigzag_indices(length, group.size)
    mine = index[group.rank]
    wanted = [each[:, :, mine] for each in alone]
    found = [
        max(differences(train_once(group, index, inputs, above, method=method, **options), wanted))
        for method in methods
    ]
    # Beside the formula.
    q, k, v = (each.clone().requires_grad_() for each in inputs)
    factors = PositionalDropout(0.3, 2**40 + 7, 0, heads).factors(2, heads, torch.arange(length), torch.arange(length))
    hidden = ~torch.ones(length, length, dtype=torch.bool).tril()
    weights = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    out = (weights * factors) @ v
    out.backward(above)
    found.append(max(differences(alone, [out.detach(), q.grad, k.grad, v.grad])))
    return found


def test_the_same_weights_drop_out_at_any_degree(ranks):
    for found in ranks(_drop, 4, METHODS):
        assert max(found) <= 1e-9
    places = torch.arange(300)
    kept = PositionalDropout(0.3, 1, 0, 2).factors(2, 2, places, places) > 0
    assert kept.double().mean().item() == pytest.approx(0.7, abs=0.003)
    for one, other in ((kept[0], kept[1]), (kept[:, 0], kept[:, 1]), (kept, kept.transpose(-1, -2))):
        assert (one == other).double().mean().item() == pytest.approx(0.58, abs=0.01)  # independent
    again = PositionalDropout(0.3, 2, 0, 2).factors(2, 2, places, places) > 0
    assert (kept == again).double().mean().item() == pytest.approx(0.58, abs=0.01)


def _cap_and_sink(methods):
    """Differences from the formula of attention with soft-capped scores and with sinks."""
    group = Group.whole()
    length, heads = 24, 4
    index = zigzag_indices(length, group.size)
    mine = index[group.rank]
    inputs = [random_numbers(2, heads, length, 8, seed=each) for each in range(3)]
    above = random_numbers(2, heads, length, 8, seed=3)
    mask = (random_numbers(length, length, seed=4) > -1) & (torch.arange(length)[:, None] % 7 != 3)
    sinks = random_numbers(heads, seed=5)
    found = []
    for cap, has_sinks in ((2.0, False), (None, True), (2.0, True)):
        q, k, v, of_sink = (each.clone().requires_grad_() for each in (*inputs, sinks))
        scores = q @ k.transpose(-1, -2) / 8**0.5
        scores = cap * torch.tanh(scores / cap) if cap else scores
        scores = scores.masked_fill(~mask, -torch.inf)
        beside = of_sink[:, None, None].expand(2, -1, length, 1)
        weights = (
            torch.cat([scores, beside], -1).softmax(-1)[..., :-1] if has_sinks else scores.softmax(-1).nan_to_num(0.0)
        )
        out = weights @ v
        out.backward(above)
        wanted = [out.detach(), q.grad, k.grad, v.grad]
        for method in methods:
            learned = sinks.clone().requires_grad_()
            options = {"softcap": cap, "sinks": learned if has_sinks else None, "mask": mask[mine], "method": method}
            got = train_once(group, index, inputs, above, **options)
            found += differences(got, [each.nan_to_num(0.0)[:, :, mine] for each in wanted])
            if has_sinks:
                dist.all_reduce(learned.grad)
                found += differences([learned.grad], [of_sink.grad])
    return found


def test_soft_capped_scores_and_sinks(ranks):
    for found in ranks(_cap_and_sink, 4, METHODS):
        assert max(found) <= 1e-9


def _sum_up():
    """Differences of the log-sum-exp of scores and of its gradients, which all methods return beside the result."""
    group = Group.whole()
    index = zigzag_indices(22, group.size)
    mine = index[group.rank]
    inputs = [random_numbers(2, heads, 22, 8, seed=heads) for heads in (4, 2, 2)]
    whole = [each.clone().requires_grad_() for each in inputs]
    scores = whole[0] @ whole[1].repeat_interleave(2, 1).transpose(2, 3) / 8**0.5
    scores = scores.masked_fill(~torch.ones(22, 22).tril().bool(), -torch.inf)
    (
        scores.softmax(-1) @ whole[2].repeat_interleave(2, 1) * scores.logsumexp(-1, keepdim=True)
    ).square().sum().backward()
    wanted = [scores.logsumexp(-1)[:, :, mine].detach(), *(each.grad[:, :, mine] for each in whole)]
    found = []
    for method in METHODS:
        parts = [each[:, :, mine].clone().requires_grad_() for each in inputs]
        out, logsumexp = attend_with_logsumexp(
            *parts, query_index=index, key_index=index, group=group, causal=True, grouped=True, method=method
        )
        (out * logsumexp[..., None]).square().sum().backward()
        found += differences([logsumexp.detach(), *(each.grad for each in parts)], wanted)
    return found


def test_sums_of_scores_have_gradients(ranks):
    for found in ranks(_sum_up, 2):
        assert max(found) <= 1e-9


def _ways_of_calling():
    """Differences between ways of calling attention that must not differ, and what was exchanged for them."""
    group = Group.whole()
    length = 26
    index = zigzag_indices(length, group.size)
    mine = index[group.rank]
    inputs = [random_numbers(2, 4, length, 8, seed=each, dtype=torch.float32) for each in range(3)]
    above = random_numbers(2, 4, length, 8, seed=3, dtype=torch.float32)
    mask = torch.rand(length, length, generator=torch.Generator().manual_seed(4))[mine] > 0.4
    found = {}
    for method in METHODS:
        options = {"mask": mask, "method": method}
        wanted = train_once(group, index, inputs, above, **options)
        before = counters_of(group).masks
        found[method, "again"] = differences(train_once(group, index, inputs, above, **options), wanted)
        found[method, "masks exchanged again"] = [counters_of(group).masks - before]
        parts = [each[:, :, mine].clone().requires_grad_() for each in inputs]

        def call(*parts, method=method):
            return attend(*parts, query_index=index, key_index=index, group=group, mask=mask, method=method)

        with torch.no_grad():
            found[method, "without gradients"] = differences([call(*parts)], wanted[:1])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found[method, "autocast"] = differences([call(*parts).detach()], wanted[:1])
        for reentrant in (True, False):
            out = torch.utils.checkpoint.checkpoint(call, *parts, use_reentrant=reentrant)
            gradients = torch.autograd.grad if not reentrant else None
            if gradients:
                got = gradients(out, parts, above[:, :, mine])
            else:
                out.backward(above[:, :, mine])
                got = [each.grad for each in parts]
            found[method, f"checkpoint {reentrant}"] = differences([out.detach(), *got], wanted)
        for place in range(3):
            parts = [each[:, :, mine].clone().requires_grad_(number == place) for number, each in enumerate(inputs)]
            call(*parts).backward(above[:, :, mine])
            found[method, f"only {place}"] = differences([parts[place].grad], [wanted[1 + place]])
        mask[:, 3] = ~mask[:, 3]  # what is known about the mask is out of date
        whole = torch.rand(length, length, generator=torch.Generator().manual_seed(4)) > 0.4
        whole[:, 3] = ~whole[:, 3]
        expected = F.scaled_dot_product_attention(*inputs, attn_mask=whole)[:, :, mine]
        found[method, "changed mask"] = [
            each / 10 for each in differences([call(*(each[:, :, mine] for each in inputs))], [expected])
        ]
        mask[:, 3] = ~mask[:, 3]
    return {name: max(values) for name, values in found.items()}


def test_ways_of_calling(ranks):
    for results in ranks(_ways_of_calling, 2):
        for name, difference in results.items():
            assert difference <= 1e-6, name


@pytest.mark.parametrize("kind", [1, 2, 3], ids=["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("masked", [False, True])
def test_operators_of_gpus_take_these_arguments(kind, masked):
    if kind == 1 and masked:
        pytest.skip("flash takes no masks")
    with torch.device("meta"):  # shapes only, by the same operators
        q = torch.empty(2, 8, 50, 20, dtype=torch.bfloat16)
        k = torch.empty(2, 4, 70, 20, dtype=torch.bfloat16)
        tile = torch.empty(2, 1, 50, 70, dtype=torch.bool) if masked else None
        bias, hidden = fused.as_bias(tile, q)
        assert hidden is None or hidden.shape == (2, 1, 50, 1)
        operator = fused.FusedOperator(kind, causal=False, scale=0.3)
        out, logsumexp = fused.forward(operator, q, k, k, bias)
        assert (out.shape, logsumexp.shape, logsumexp.dtype) == (q.shape, (2, 8, 50), torch.float32)
        gradients = fused.backward(operator, out, (q, k, k), bias, out, logsumexp.contiguous())
        assert [each.shape for each in gradients] == [q.shape, k.shape, k.shape]


def _trained_on_devices(seed, whole):
    """Differences between devices and host memory, and in how many calls the host waited for a device."""
    from smp_emulation.checked import emulated

    options = {"causal": True, "grouped": True}
    length = 30
    index = zigzag_indices(length, 2)
    inputs = [random_numbers(1, heads, length, 8, seed=heads) for heads in (4, 2, 2)]
    above = random_numbers(1, 4, length, 8, seed=9)
    mask = (random_numbers(length, length, seed=4) > -0.5)[index[int(os.environ["RANK"])]]
    with emulated(seed, devices=2) as emulation:
        torch.cuda.set_device(int(os.environ["RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
        group = Group.whole()
        there = [each.to("cuda") for each in inputs]
        found = {}
        for number, method in enumerate(METHODS):
            masks = (None, mask.to("cuda"))
            for one in masks if whole else masks[number % 2 :][:1]:
                expected = train_once(group, index, inputs, above, mask=None if one is None else mask, **options)
                mine = index[group.rank].to("cuda")
                parts = [each[:, :, mine].requires_grad_() for each in there]
                gradient = above.to("cuda")[:, :, mine]
                for _ in range(2):
                    emulation.waits.clear()
                    out = attend(
                        *parts, query_index=index, key_index=index, group=group, mask=one, method=method, **options
                    )
                    gradients = torch.autograd.grad(out, parts, gradient)
                    waits = [str(wait) for wait in emulation.waits]
                torch.cuda.synchronize()
                got = [each.cpu() for each in (out.detach(), *gradients)]
                found[method, one is None] = max(differences(got, expected)), waits
        dist.destroy_process_group()
    return found


def test_streams_of_devices_are_in_order(ranks):
    for results in ranks(_trained_on_devices, 2, 3, matrix.is_whole, init=False):
        for name, (difference, waits) in results.items():
            assert difference <= 1e-9, name
            assert not waits, name


def test_arguments_that_do_not_fit():
    q = torch.zeros(1, 4, 3, 8)
    good = {"query_index": [torch.arange(3)], "key_index": [torch.arange(3)], "group": Group.alone()}
    with pytest.raises(AssertionError, match="each once"):
        attend(q, q, q, **good | {"key_index": [torch.tensor([0, 1, 1])]})
    with pytest.raises(AssertionError, match="2 key heads"):
        attend(q, q[:, :2], q[:, :2], **good)
    with pytest.raises(AssertionError, match="seed"):
        attend(q, q, q, dropout=0.1, **good)
    with pytest.raises(AssertionError, match="mask of shape"):
        attend(q, q, q, mask=torch.zeros(2, 3), **good)
    with pytest.raises(AssertionError, match="types"):
        attend(q, q.double(), q.double(), **good)
    with pytest.raises(AssertionError, match="rows"):
        attend(q[:, :, :2], q, q, **good)
