"""``flex_attention`` and ``varlen_attn`` over ranks that share sequences out give the values and gradients of one process."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from support.models.long_sequences import CausalNet, next_word_loss, word_batches
from support.ranks.context_threads import assert_equal_to_alone, cut, run_context
from support.training.rank_training import training_step, updates
from support.training.reference import train_alone
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import flex_attention  # a name from before the runtime sees sequences in it

from smp_runtime.context import functions
from smp_runtime.context.rules import flexible
from smp_runtime.context.sequence import ShardedSequence
from smp_runtime.errors import SMPUserError


def compiled(*args, **kwargs):
    """As scripts call it; made here, since it imports the compiler, which no other file of tests needs."""
    return torch.compile(flex_attention, backend="eager")(*args, **kwargs)


B, H, K, T, S, D = 2, 4, 2, 21, 13, 6
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 9 + [2] * 5, [0] * 2 + [1] * 19])


@pytest.fixture(autouse=True)
def _installed():
    flexible.install()


def _given(dtype=torch.float64):
    random = torch.Generator().manual_seed(3)
    shapes = {
        "q": (B, T, H, D),
        "k": (B, T, K, D),
        "v": (B, T, K, D + 1),
        "slopes": (H,),
        "bias": (B, T, T),
        "y": (B, S, K, D),
    }
    return {name: torch.randn(shape, generator=random, dtype=dtype).requires_grad_() for name, shape in shapes.items()}


def _causal(_):
    return lambda b, h, q, k: q >= k


def _documents(given):
    numbers = given["numbers"]
    return lambda b, h, q, k: (q >= k) & (numbers[b, q] == numbers[b, k])


def _windows(_):
    return lambda b, h, q, k: (q - k).abs() <= 2 + h * 3


def _of_one_sample(_):
    return lambda b, h, q, k: (k < T - 4) | (b == 1)


def _hides_rows(_):
    return lambda b, h, q, k: (q > 3) & (k <= q)


def _capped(_):
    return lambda score, b, h, q, k: 2 * torch.tanh(score / 2)


def _sloped(given):
    slopes = given["slopes"]
    return lambda score, b, h, q, k: score - slopes[h] * (q - k).abs()


def _biased(given):
    bias = given["bias"]
    return lambda score, b, h, q, k: score + bias[b, q, k]


def _same(_):
    factor = None
    return lambda score, b, h, q, k: score if factor is None else score * factor


#: Functions of the given tensors that return a function of masks and one of scores, and whether it gathers keys.
CASES = {
    "all": (None, None, False),
    "causal": (_causal, None, False),
    "the same scores": (_causal, _same, False),
    "documents": (_documents, None, False),
    "windows by head": (_windows, None, False),
    "padding by sample": (_of_one_sample, None, False),
    "rows that attend to nothing": (_hides_rows, None, False),
    "soft cap": (_causal, _capped, True),
    "learned slopes": (_causal, _sloped, True),
    "bias that is cut": (_hides_rows, _biased, True),
}


def _reference(given, mask, score):
    """The attention and its log-sum-exp by plain operations."""
    q, k, v = (given[name].transpose(1, 2) for name in "qkv")
    k, v = (each.repeat_interleave(H // K, 1) for each in (k, v))
    places = torch.meshgrid(*(torch.arange(size) for size in (B, H, T, T)), indexing="ij")
    scores = q @ k.transpose(2, 3) / math.sqrt(D)
    if score is not None:
        scores = score(given)(scores, *places)
    if mask is not None:
        scores = scores.masked_fill(~mask(given)(*places), -torch.inf)
    hidden = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(hidden, 0.0)
    return (scores.softmax(-1) @ v).masked_fill(hidden, 0.0), scores.logsumexp(-1)[..., None].masked_fill(hidden, 0.0)


def _attention(given, mask, score, call):
    q, k, v = (given[name].transpose(1, 2) for name in "qkv")
    block_mask = mask and flex.create_block_mask(mask(given), B, H, T, T, device="cpu", BLOCK_SIZE=8)
    out, aux = call(
        q, k, v, score and score(given), block_mask, enable_gqa=True, return_aux=flex.AuxRequest(lse=True)
    )  # fmt: skip
    lse = aux.lse[..., None]
    return out, lse.masked_fill(lse == -torch.inf, 0.0)


def _trained(out, lse, given, uses_lse):
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    ((out * weights).sum() + uses_lse * (lse * lse).sum()).backward()
    return {name: each.grad for name, each in given.items() if each.is_floating_point()}


@pytest.mark.parametrize("uses_lse", [False, True], ids=["", "with log-sum-exp"])
@pytest.mark.parametrize("case", CASES)
def test_flexible_attention_is_that_of_one_process(case, uses_lse):
    mask, score, gathers = CASES[case]
    alone = _given() | {"numbers": DOCUMENTS}
    wanted = _reference(alone, mask, score)
    gradients = _trained(*wanted, alone, uses_lse)

    def rank(group):
        leaves = _given()
        names = {"q", "k", "v", "bias"}
        given = {name: cut(each, group) if name in names else each for name, each in leaves.items()}
        call = compiled if case == "causal" and uses_lse else flex_attention
        out, lse = _attention(given | {"numbers": cut(DOCUMENTS, group)}, mask, score, call)
        assert isinstance(out, ShardedSequence)
        assert isinstance(lse, ShardedSequence)
        gathered = "flex_attention" in group.gathered
        of_rank = _trained(out, lse, leaves, uses_lse)
        return (out.whole("test"), lse.whole("test")), of_rank, gathered

    everyone = run_context(2, rank)
    for results, _, gathered in everyone:
        torch.testing.assert_close(results, wanted, atol=1e-10, rtol=1e-10)
        assert gathered is gathers
    for name, gradient in gradients.items():
        parts = [grads[name] for _, grads, _ in everyone if grads[name] is not None]
        if gradient is None:
            assert not parts, name
        else:
            torch.testing.assert_close(
                sum(parts) / 2, gradient, atol=1e-10, rtol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


@torch.no_grad()
def _forward(whole, score_mod, block_mask, group):
    parts = (cut(each, group, 2) for each in whole)
    return flex_attention(*parts, score_mod, block_mask, enable_gqa=True).whole("test")


@torch.no_grad()
def test_it_is_what_pytorch_computes():
    """Without gradients, which PyTorch has on GPUs only."""
    for mask, score, _ in (CASES["windows by head"], CASES["soft cap"]):
        given = {name: each.detach() for name, each in _given(torch.float32).items()} | {"numbers": DOCUMENTS}
        q, k, v = (given[name].transpose(1, 2)[..., :D] for name in "qkv")
        block_mask = mask and flex.create_block_mask(mask(given), B, H, T, T, device="cpu", BLOCK_SIZE=8)
        wanted = flexible.original(q, k, v, score and score(given), block_mask, enable_gqa=True)
        both = run_context(2, functools.partial(_forward, (q, k, v), score and score(given), block_mask))
        for found in both:
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_blocks_without_a_function_of_positions():
    numbers, columns = torch.tensor([[[1, 2, 1]]]), torch.tensor([[[[0, 1, 2], [2, 0, 1], [1, 2, 0]]]])
    block_mask = flex.BlockMask.from_kv_blocks(numbers, columns, BLOCK_SIZE=8, seq_lengths=(T, T))
    blocks = torch.tensor([[1, 0, 0], [1, 0, 1], [0, 1, 0]]).bool()

    def listed(_):
        return lambda b, h, q, k: blocks[q // 8, k // 8]

    wanted, _ = _reference(_given(), listed, None)

    def rank(group):
        q, k, v = (cut(_given()[name], group).transpose(1, 2) for name in "qkv")
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True).whole("test")

    for found in run_context(2, rank):
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)


def test_keys_of_another_length_that_are_whole_or_cut():
    given = _given()
    q, y = given["q"].transpose(1, 2), given["y"].transpose(1, 2)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, y, y, enable_gqa=True)

    def rank(group):
        mine, theirs = cut(q, group, 2), cut(y, group, 2)
        results = [
            flex_attention(*each, enable_gqa=True)
            for each in ((mine, y, y), (mine, theirs, theirs), (q, theirs, theirs))
        ]
        top = flex_attention(mine, y, y, enable_gqa=True, return_aux=flex.AuxRequest(max_scores=True))[1].max_scores
        return [getattr(each, "whole", lambda _, e=each: e)("test") for each in (*results, top)]

    for *results, top in run_context(2, rank):
        for found in results:
            torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)
        scores = q @ y.repeat_interleave(2, 1).transpose(2, 3) / math.sqrt(D)
        torch.testing.assert_close(top, scores.amax(-1), atol=1e-10, rtol=1e-10)


def test_arguments_that_do_not_fit_are_refused():
    def rank(group):
        q, k, v = (cut(_given()[name], group).transpose(1, 2) for name in "qkv")
        with pytest.raises(SMPUserError, match="enable_gqa"):
            flex_attention(q, k, v)
        short = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, S, S, device="cpu")
        with pytest.raises(SMPUserError, match="13 queries"):
            flex_attention(q, k, v, block_mask=short, enable_gqa=True)

    run_context(2, rank)


def test_functions_that_a_model_compiles_run_as_they_are():
    def mixed(x):
        return torch.nn.functional.gelu(x) * x.cumsum(1)

    run = torch.compile(mixed, backend="eager")

    def rank(group):
        leaf = _given()["bias"]
        found = run(cut(leaf, group))
        (found * found).sum().backward()
        return found.whole("test"), leaf.grad

    x = _given()["bias"]
    wanted = mixed(x)
    (wanted * wanted).sum().backward()
    everyone = run_context(2, rank)
    torch.testing.assert_close(everyone[0][0], wanted)
    torch.testing.assert_close(sum(gradient for _, gradient in everyone) / 2, x.grad)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_models_of_transformers(family):
    """Padding, windows and soft caps; PyTorch trains ``flex_attention`` on GPUs only, so one process has another one."""
    hf = pytest.importorskip("transformers")
    functions.install()
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = hf.AutoConfig.for_model(
        family, **sizes, num_hidden_layers=2, vocab_size=50, sliding_window=8, pad_token_id=0
    )
    ids = torch.randint(3, 50, (2, T), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, T - 4 :] = 0
    labels = ids.masked_fill(mask == 0, -100)

    def made(attention):
        torch.manual_seed(0)
        return hf.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)

    def train(model, ids, labels):  # its loss shifts the labels
        loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        return loss.item()

    alone, models = made("eager"), [made("flex_attention") for _ in range(2)]
    with torch.compiler.set_stance("force_eager"):  # Transformers compiles what makes masks
        found = run_context(
            2, lambda group: (train(models[group.rank], cut(ids, group), cut(labels, group)), group.gathered)
        )
    losses, gathered = zip(*found, strict=True)
    assert [set(each) for each in gathered] == [set() if family == "llama" else {"flex_attention"}] * 2
    assert list(losses) == pytest.approx([train(alone, ids, labels)] * 2, abs=1e-5)
    for one, other, wanted in zip(*(each.parameters() for each in (*models, alone)), strict=True):
        error = (one.grad + other.grad) / 2 - wanted.grad
        assert error.abs().max() <= 1e-4 * wanted.grad.abs().max()


def _train_flexibly():
    """One rank's part; runs inside a rank process."""
    from support.models import long_sequences

    import smdistributed.modelparallel.torch as smp

    def attend(query, key, value, is_causal):
        length = query.shape[2]
        mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cpu")
        return flex_attention(query, key, value, block_mask=mask)

    before = long_sequences.functional
    long_sequences.functional = SimpleNamespace(scaled_dot_product_attention=attend, cross_entropy=before.cross_entropy)
    try:
        model = smp.DistributedModel(long_sequences.CausalNet())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
        step = training_step(model, long_sequences.next_word_loss)
        return list(updates(step, optimizer, long_sequences.word_batches(2, 2)))
    finally:
        long_sequences.functional = before  # other tests have the same process


def test_models_of_a_job_have_it(ranks):
    alone = train_alone(CausalNet(), lambda given: torch.optim.SGD(given, lr=1e-2), word_batches(2, 2), next_word_loss)
    for losses in ranks(_train_flexibly, 2, config={"ddp": True, "context_parallel_degree": 2}):
        assert losses == pytest.approx(alone.losses, abs=1e-5)


def _ends(*lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


#: Ends of the documents of queries and keys, and the window.
PACKED = {
    "documents": (_ends(5, 0, 9, 7), None, (-1, -1)),
    "causal": (_ends(5, 9, 7), None, (-1, 0)),
    "windows": (_ends(5, 9, 7), None, (2, 0)),
    "both sides": (_ends(5, 9, 7), None, (2, 1)),
    "padded": (_ends(5, 9, 3), None, (-1, 0)),
    "two lengths": (_ends(5, 9, 7), _ends(8, 2, 3), (-1, -1)),
    "two lengths, causal": (_ends(5, 9, 7), _ends(8, 9, 4), (-1, 0)),
}


def _attend_to_documents(q, k, v, ends_q, ends_k, window):
    """What PyTorch has for GPUs only: attention in each document; the last query is at the last key."""
    k, v = (each.repeat_interleave(H // K, 1) for each in (k, v))
    out, lse = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_zeros(H, len(q))
    for (begin, end), (first, last) in zip(itertools.pairwise(ends_q), itertools.pairwise(ends_k), strict=True):
        rows, keys = torch.arange(begin, end), torch.arange(first, last)
        place = rows[:, None] - end + last
        seen = (window[0] < 0) | (keys >= place - window[0])
        seen = seen & ((window[1] < 0) | (keys <= place + window[1]))
        hidden = ~seen.any(-1)[:, None]
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], k[first:last]) * 0.3
        scores = scores.masked_fill(~seen, -torch.inf).masked_fill(hidden, 0.0)
        weights = scores.softmax(-1).masked_fill(hidden, 0.0)
        out = out.index_copy(0, rows, torch.einsum("hqk,khd->qhd", weights, v[first:last]))
        lse = lse.index_copy(1, rows, scores.logsumexp(-1).masked_fill(hidden[:, 0], 0.0))
    return out, lse


@pytest.mark.parametrize("case", PACKED)
def test_packed_documents_are_ranges_of_keys(case):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    ends_q, ends_k, window = PACKED[case]
    ends_k = ends_q if ends_k is None else ends_k
    keys = max(int(ends_k[-1]), T if ends_k is ends_q else 0)

    def leaves():
        given = _given()
        return [given["q"][0].detach().requires_grad_(), *(given[n][0, :keys].detach().requires_grad_() for n in "kv")]

    def train(out, lse, given):
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
        ((out * weights).sum() + (lse * lse).sum()).backward()
        return [each.grad for each in given]

    alone = leaves()
    wanted = _attend_to_documents(*alone, ends_q.tolist(), ends_k.tolist(), window)
    gradients = train(*wanted, alone)

    def rank(group):
        given = leaves()
        parts = [cut(each[None], group).flatten(0, 1) for each in given]
        out, lse = varlen.varlen_attn(
            *parts, ends_q, ends_k, 9, 9, window_size=window, scale=0.3, enable_gqa=True, return_aux=varlen.AuxRequest(lse=True)
        )  # fmt: skip
        assert not group.gathered
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        return (out.whole("test"), lse.whole("test")), train(out, lse, given)

    assert_equal_to_alone(run_context(2, rank), wanted, gradients)
