"""State that is sharded: whole when asked for, saved and loaded, and never whole when it is created late."""

from __future__ import annotations

import pytest
import torch
from support.models.models import TiedNet, loss_of, token_batch, token_batches
from support.training.rank_training import training_step, updates
from support.training.sharded_training import Blocks, settings
from torch import nn

BATCH = 8


def _run(path, first, last, load, **options):
    """Train steps ``first`` to ``last``; save before step 5, or start from what was saved."""
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0 if not load else 5)
    model = smp.DistributedModel(TiedNet())
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), static_loss_scale=None, dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 256.0},
    )  # fmt: skip

    if load:
        assert smp.resume_from_checkpoint(path, **options) == {"step": 5}
    losses = []
    for loss in updates(training_step(model), optimizer, token_batches(first, last, BATCH)):
        losses.append(loss)
        if len(losses) == 5 and not load:
            smp.save_checkpoint(path, tag="5", user_content={"step": 5})
            smp.save_checkpoint(path, tag="full.pt", partial=False)
    return losses


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.full), "bf16"])
def test_a_checkpoint_continues_with_the_same_and_with_other_sharding(ranks, tmp_path, precision):
    half = {} if precision == "fp32" else {precision: True}
    config = settings(TiedNet(), 2, **half)
    expected = ranks(_run, 4, str(tmp_path), 0, 10, False, config=config)[0]
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    for world, other in ((4, config), (2, settings(TiedNet(), 2, **half)), (1, {**half})):
        resumed = ranks(_run, world, str(tmp_path), 5, 10, True, config=other)[0]
        assert resumed == pytest.approx(expected[5:], rel=tolerance)
    plain = TiedNet()
    plain.load_state_dict({n: v.float() for n, v in torch.load(tmp_path / "full.pt").items()})


def test_loading_reaches_the_shards_of_every_rank_without_a_collective(ranks):
    torch.manual_seed(7)
    state = TiedNet().state_dict()

    def run(state, only_first):
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(TiedNet())
        if not only_first or smp.rank() == 0:
            model.load_state_dict({f"module.{name}": value for name, value in state.items()})
            part = {"weight": state["shared.weight"], "bias": state["shared.bias"] + 1}
            model.module.shared.load_state_dict(part)
        found = model.state_dict()
        ids, targets = token_batch(0, 2)
        try:
            loss_of(model(ids), targets).backward()
        except smp.exceptions.SMPUserError as error:
            return str(error)
        return found

    for found in ranks(run, 2, state, False, config=settings(TiedNet(), 2)):
        assert torch.equal(found.pop("shared.bias"), state["shared.bias"] + 1)
        for name, value in found.items():
            assert torch.equal(value, state[name]), name
    for said in ranks(run, 2, state, True, config=settings(TiedNet(), 2)):
        assert "call load_state_dict on every rank" in said


def test_attributes_that_scripts_read(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(TiedNet())
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
        for name, parameter in model.named_parameters():
            assert parameter.ds_shape == parameter.shape, name
            assert parameter.ds_numel == parameter.numel()
            assert parameter.ds_tensor.numel() <= parameter.numel()
            assert parameter.ds_tensor.ds_numel == parameter.ds_tensor.numel()
        assert [len(group) for group in optimizer.fp16_groups] == [len(list(model.parameters()))]
        assert optimizer.fp32_partitioned_groups_flat[0].dtype is torch.float32
        of_groups = [sum(p.ds_tensor.ds_numel for p in group) for group in optimizer.fp16_groups]
        assert of_groups == [flat.numel() for flat in optimizer.fp32_partitioned_groups_flat]
        assert optimizer.ds_param_shard_group.size() == 2
        return optimizer.fp32_partitioned_groups_flat[0].numel()

    config = settings(TiedNet(), 2, bf16=True)
    assert sum(ranks(run, 2, config=config)) == sum(p.numel() for p in TiedNet().parameters())
    # Parameters below the threshold, which every rank has whole, have them too.
    ranks(run, 2, config={**config, "sdp_param_persistence_threshold": 10**6})


def test_the_state_of_the_module_inside_is_refused_where_it_would_be_nan(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(TiedNet())
        for module in (model.module, model.module.shared):
            with pytest.raises(smp.exceptions.SMPUserError, match=r"holds 1/2 .* call model.state_dict\(\)"):
                module.state_dict()
        assert all(value.isfinite().all() for value in model.state_dict().values())
        with pytest.raises(smp.exceptions.SMPUserError):
            model.module.state_dict()
        names = list(model.module.state_dict(keep_vars=True))
        assert names == list(model.state_dict()) == list(TiedNet().state_dict())
        assert list(model.local_state_dict()) == [*names, "_smp_is_partial"]

    ranks(run, 2, config=settings(TiedNet(), 2))


class Reinitialised(Blocks):
    """Like most models: every weight is drawn when its layer is made, and again at the end."""

    def __init__(self) -> None:
        super().__init__(layers=6, hidden=32)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)))
        self.apply(self._again)

    @staticmethod
    def _again(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.full), "bf16"])
def test_delayed_creation_gives_the_same_shards_bit_for_bit_and_never_the_model(ranks, precision):
    def run(delayed):
        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(smp.rank())  # the first rank's weights count
        with smp.delay_param_initialization(enabled=delayed):
            module = Reinitialised()
        peak = 0
        if delayed:
            from smp_runtime.parameters import deferred_creation, late_values

            original = deferred_creation.view_like
            seen = {}

            def watched(meta, real):
                now = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in real.values()}
                seen["peak"] = max(seen.get("peak", 0), sum(now.values()))
                return original(meta, real)

            deferred_creation.view_like = late_values.view_like = watched
        try:
            model = smp.DistributedModel(module)
        finally:
            if delayed:
                deferred_creation.view_like = late_values.view_like = original
                peak = seen["peak"]
        shards = [unit.shard.clone() for unit in model.shards.units]
        masters = [p.optimized.detach().clone() for p in model.optimizer_shards.values() if p is not None]
        after = torch.rand(1)
        return model.state_dict(), shards, masters, peak, after

    half = {} if precision == "fp32" else {precision: True}
    config = settings(Reinitialised(), 2, **half)
    immediate, delayed = ranks(run, 4, False, config=config), ranks(run, 4, True, config=config)
    largest = max(p.numel() for p in Reinitialised().parameters())
    for one, other in zip(immediate, delayed, strict=True):
        assert one[0].keys() == other[0].keys()
        for name in one[0]:
            assert torch.equal(one[0][name], other[0][name]), name
        for mine, theirs in zip([*one[1], *one[2]], [*other[1], *other[2]], strict=True):
            assert torch.equal(mine, theirs)
        # A weight and its bias and what initialises them, of more than fifty thousand elements.
        assert other[3] <= 4 * 3 * largest
    assert torch.equal(immediate[0][4], delayed[0][4])  # the script's own numbers go on as if nothing were delayed
