"""Large operations only allocate, small ones are performed; both look the same from outside."""

import functools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_tools.rehearsal.skip_compute_mode import SkipComputeMode, as_fused

#: Elements of a tensor whose operations are not performed here.
LARGE = 4096


class Heard:
    """Remembers what it was told."""

    def __init__(self):
        self.operations = []

    def performed(self, operation):
        self.operations.append(operation)


def unperformed(*watchers):
    return SkipComputeMode(watchers, performed_bytes=4096)


def test_small_operations_have_their_values():
    with unperformed():
        order = torch.arange(5).flip(0)
        assert order.tolist() == [4, 3, 2, 1, 0]
        assert (order.float().mean() + 1).item() == 3


def test_a_large_result_is_allocated_and_not_computed():
    given = torch.full((LARGE,), 7.0)
    with unperformed():
        made = given * 3
    assert made.shape == given.shape
    assert made.untyped_storage().nbytes() == given.nbytes
    assert 21.0 not in made.tolist()


def test_a_large_tensor_is_not_written_in_place():
    given = torch.full((LARGE,), 7.0)
    with unperformed():
        same = given.add_(1)
    assert same is given
    assert given.eq(7).all()


def test_a_small_part_of_a_large_tensor_is():
    given = torch.zeros(LARGE)
    with unperformed():
        given[-3:].copy_(torch.tensor([1.0, 0.0, 2.0]))
        assert (given[-3:] > 0).tolist() == [True, False, True]


def test_a_reduction_of_what_nobody_computed_is_finite():
    with unperformed():
        loss = torch.randn(LARGE).pow(2).mean()
        assert loss.item() == 1
        assert torch.isfinite(torch.randn(LARGE)).all().item()
        assert torch.randn(LARGE).argmax().item() == 0


def test_views_share_the_memory_of_what_they_show():
    with unperformed():
        whole = torch.randn(64, LARGE)
        for part in (whole[1], whole.t(), whole.view(-1), torch.ops.aten._unsafe_view(whole, (-1,))):
            assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_gives_gradients_of_the_shapes_that_it_gives_otherwise(dtype):
    def gradients(mode):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, dtype=dtype)
        with mode:
            out = layer(torch.randn(4, 16, 64, dtype=dtype))
            F.cross_entropy(out.flatten(0, 1).float(), torch.zeros(64, dtype=torch.long)).backward()
        return [(p.grad.shape, p.grad.stride(), p.grad.dtype) for p in layer.parameters()]

    assert gradients(unperformed()) == gradients(SkipComputeMode(performed_bytes=None))


def test_numbers_of_different_types_are_different_arguments():
    counted = torch.zeros(LARGE, dtype=torch.long)
    with unperformed():
        assert (counted + 1).dtype is torch.long
        assert (counted + 1.0).dtype is torch.float32


def test_shapes_that_do_not_fit_are_the_error_that_they_always_are():
    with unperformed(), pytest.raises(RuntimeError, match=r"mat1|shapes|size"):
        torch.randn(LARGE, 3) @ torch.randn(4, 5)


def test_what_depends_on_values_of_large_tensors_names_the_line():
    with unperformed(), pytest.raises(SMPUserError, match=r"nonzero at .*test_operations.py:\d+ asks .*\(4096,\)"):
        torch.randn(LARGE).nonzero()
    with unperformed():
        assert torch.tensor([0, 3, 0]).nonzero().tolist() == [[1]]


def test_rows_are_picked_by_number_and_not_by_a_mask():
    table = torch.randn(LARGE, 4)
    with unperformed():
        assert table[torch.tensor([3, 1])].shape == (2, 4)
        with pytest.raises(SMPUserError, match="index at"):
            table[table[:, 0] > 0]


def test_watchers_hear_of_operations_with_their_tensors_and_not_of_views():
    heard = Heard()
    given = torch.ones(LARGE)
    with unperformed(heard):
        made = given[:10] + given[10:20]
    (operation,) = heard.operations
    assert operation.function is torch.ops.aten.add.Tensor
    assert len(operation.given) == 2
    assert operation.made[0] is made


def test_attention_with_dropout_keeps_no_scores_as_on_a_gpu():
    heard = Heard()
    heads = torch.zeros(1, 2, 256, 16, requires_grad=True)
    with unperformed(heard):
        out = as_fused(F.scaled_dot_product_attention)(heads, heads, heads, dropout_p=0.5, is_causal=True)
    assert out.shape == heads.shape
    assert heard.operations
    assert all(made.numel() < 256 * 256 for operation in heard.operations for made in operation.made)


@pytest.mark.parametrize("length", [24, 1 << 17])
def test_positions_and_plans_are_computed_however_long_sequences_are(length):
    from smp_runtime.context.attention.bounds import bounds_of
    from smp_runtime.context.attention.plan import plan_for
    from smp_runtime.context.attention.positions import positions_of
    from smp_runtime.context.layout import zigzag

    zigzag.cache_clear()
    with unperformed():
        held = positions_of(zigzag(length, 4).positions)
        plan = plan_for(held, held, 0, None, bounds=bounds_of(None, length, causal=True), at_once=False)
        masked = zigzag(length, 4).padded(0, 1)
    quarter, half = length // 4, length // 8
    assert held.counts == [quarter] * 4
    assert {distance: len(block.positions) for distance, block in plan.arriving.items()} == dict.fromkeys(
        (1, 2, 3), quarter
    )
    assert [len(plan.leaving[distance]) for distance in (1, 2, 3)] == [half] * 3
    assert plan.scores() * 4 == length * (length + 1) // 2
    assert masked.length == length + 1


@pytest.mark.parametrize("rows", [24, 4096])
def test_masks_that_are_not_computed_hide_nothing(monkeypatch, rows):
    """A mask of zeros is memory that nothing was written to: read, it would say that no rank sends anything."""
    from smp_runtime.context.attention import visibility
    from smp_runtime.context.attention.bounds import bounds_of
    from smp_runtime.context.attention.positions import positions_of
    from smp_runtime.context.layout import zigzag
    from smp_tools.rehearsal import assumed_masks

    class Pair:
        rank, size = 0, 2

    gathered = []
    monkeypatch.setattr(visibility, "analyze", visibility.analyze)
    monkeypatch.setattr(assumed_masks, "gather_bits", lambda group, bits: gathered.append(bits.numel()))
    monkeypatch.setattr(visibility, "gather_bits", lambda group, bits: bits.expand(2, -1))
    assumed_masks.assume_masks(4096)
    held = positions_of(zigzag(rows, 2).positions)
    mask = torch.zeros(1, 1, rows // 2, rows, dtype=torch.bool)
    with unperformed():
        seen = visibility.analyze(mask, held, held, 0, Pair(), bounds=None)
        bounded = visibility.analyze(mask, held, held, 1, Pair(), bounds=bounds_of(None, rows, causal=True))
    is_read = rows == 24
    assert bool(seen.needed.any()) != is_read
    assert gathered == ([] if is_read else [rows, rows])
    if not is_read:
        assert bool(seen.needed.all())
        assert bounded.needed.sum(1).tolist() == [rows, 3 * rows // 4]


def test_dropped_scores_of_shared_sequences_are_dropped():
    from smp_runtime.context.layout import zigzag
    from smp_runtime.context.sequence import ShardedSequence

    asked = []
    fused = as_fused(lambda query, key, value, mask, dropout: asked.append(dropout))
    fused(torch.ones(1), None, None, None, 0.1)
    layout = zigzag(8, 2)
    fused(ShardedSequence(torch.ones(4), 0, layout, None), None, None, None, 0.1)
    assert asked == [0.0, 0.1]


def test_the_operator_of_attention_is_the_one_that_a_job_takes():
    """Attention over ranks asks for it; by plain operations, long sequences would be thousands of pieces."""
    query, key = torch.empty(1, 8, 2048, 64, dtype=torch.bfloat16), torch.empty(1, 2, 2048, 64, dtype=torch.bfloat16)
    choose = functools.partial(torch.ops.aten._fused_sdp_choice, query, key, key, scale=0.1, enable_gqa=True)
    with SkipComputeMode():
        assert choose() == choose.func(*choose.args, **choose.keywords) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have another flag for such memory")
def test_tensors_larger_than_the_memory_of_this_machine():
    one = torch.zeros(1).expand(2**20, 2**20)  # two of them are 8 TiB
    with SkipComputeMode():
        total = (one + one).requires_grad_()
        (total * total).sum().backward()
    assert total.grad.shape == one.shape
    assert total.untyped_storage().nbytes() == 2**42
