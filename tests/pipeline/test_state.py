"""The state of a model on the stages of a pipeline: saved, loaded, resumed."""

from __future__ import annotations

import pytest
import torch
from support.models.pipeline_models import built
from torch import nn


def _job(start, stop, path, save_at=None, loads=None):
    """Train steps ``start`` to ``stop``; save after ``save_at``, or resume from ``path`` first."""
    import torch
    from support.models.models import part
    from support.models.pipeline_models import CASES, built

    import smdistributed.modelparallel.torch as smp

    case = CASES["dropping"]
    model = smp.DistributedModel(built("dropping"))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @smp.step
    def train(*arguments):
        loss, _ = case.loss(model, *arguments)
        model.backward(loss)
        return loss

    torch.manual_seed(start + 50 + smp.rank())
    content = None
    if start:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        if loads is None:
            content = smp.resume_from_checkpoint(path)
        else:
            model.load_state_dict(loads)
    losses = []
    for step in range(start, stop):
        optimizer.zero_grad()
        loss = train(*part(case.batch(step, 8), smp.dp_rank(), smp.dp_size()))
        losses.append(float(loss.reduce_mean()))
        optimizer.step()
        if save_at == step + 1:
            smp.save_checkpoint(path, tag="then", user_content={"step": step + 1})
            smp.save_checkpoint(path, tag="whole.pt", partial=False)
    local = model.local_state_dict()
    full = model.state_dict()
    gathered = model.state_dict(gather_to_rank0=True)
    return {
        "losses": losses,
        "content": content,
        "local": local,
        "full": full,
        "gathered": gathered,
        "named": sorted(name for name, _ in model.local_named_parameters()),
        "mp_rank": smp.mp_rank(),
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"partitions": 2, "microbatches": 2},
        {"partitions": 2, "microbatches": 2, "ddp": True},
        pytest.param({"partitions": 2, "ddp": True, "shard_optimizer_state": True}, marks=pytest.mark.full),
        pytest.param({"partitions": 2, "bf16": True}, marks=pytest.mark.full),
        pytest.param({"partitions": 4, "microbatches": 4}, marks=pytest.mark.full),
    ],
    ids=lambda settings: "-".join(f"{key}={value}" for key, value in settings.items()),
)
def test_a_resumed_run_continues_as_if_never_stopped(ranks, tmp_path, settings):
    """Weights, optimizer and random numbers (dropout is on)."""
    world = settings["partitions"] * (2 if settings.get("ddp") else 1)
    whole = ranks(_job, world, 0, 8, str(tmp_path), 5, config=settings, timeout=200)
    resumed = ranks(_job, world, 5, 8, str(tmp_path), config=settings, timeout=200)
    for one, other in zip(whole, resumed, strict=True):
        assert other["content"] == {"step": 5}
        assert other["losses"] == pytest.approx(one["losses"][5:], abs=1e-6)
    names = list(built("dropping").state_dict())
    for result in whole:
        assert list(result["full"]) == names
        local = dict(result["local"])
        assert local.pop("_smp_is_partial") is True
        assert sorted(local) == result["named"]
        assert list(result["gathered"]) == (names if result["mp_rank"] == 0 else [])
        for name in names:
            assert torch.equal(result["full"][name], whole[0]["full"][name])
            if name in local:
                assert torch.equal(local[name], result["full"][name])
    # The full checkpoint is what plain PyTorch loads, and what a pipeline loads before its first step.
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    built("dropping").load_state_dict(state)
    loaded = ranks(_job, world, 5, 6, str(tmp_path), None, state, config=settings, timeout=200)
    assert all(len(result["losses"]) == 1 for result in loaded)
    for result in loaded:
        for name in names:
            change = (result["full"][name].float() - state[name].float()).abs().max()
            assert change < 0.05, name  # one step of lr 0.01 from the loaded weights, not from zero


def _first_loss(states, delayed):
    """Of a model that got this rank's state before its first step; then that state, as the model has it after the step."""
    import contextlib

    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(9)
    with smp.delay_param_initialization() if delayed else contextlib.nullcontext():
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model = smp.DistributedModel(net)
    if states is not None:
        model.load_state_dict(states[smp.rank()])

    @smp.step
    def evaluate(x):
        return model(x).square().mean()

    model.eval()
    loss = evaluate(torch.linspace(0, 1, 16).reshape(4, 4))
    return float(loss.reduce_mean()), model.local_state_dict(), model.state_dict()


@pytest.mark.parametrize("delayed", [False, True])
def test_a_state_that_comes_before_the_first_step_waits_for_the_partition(ranks, delayed):
    config = {"partitions": 2, "microbatches": 2}
    made = ranks(_first_loss, 2, None, False, config=config)
    with torch.no_grad():
        other = [({n: v + 1 if torch.is_tensor(v) else v for n, v in s.items()}) for _, s, _ in made]
        full = {name: value + 1 for name, value in made[0][2].items()}
    partial = ranks(_first_loss, 2, other, delayed, config=config)
    whole = ranks(_first_loss, 2, [full, full], delayed, config=config)
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    net.load_state_dict(full)
    expected = net(torch.linspace(0, 1, 16).reshape(4, 4)).square().mean().item()
    for loss, _, state in (*partial, *whole):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert all(torch.equal(state[name], full[name]) for name in full)


def _moved(states, cut, same):
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(3)
    model = smp.DistributedModel(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
    for index, layer in enumerate(model.module):
        smp.set_partition(layer, int(index >= cut))
    if states is not None:
        model.load_state_dict(states[smp.rank()], same_partition_load=same)
    model.eval()
    smp.step(lambda x: model(x))(torch.ones(2, 4))
    return model.local_state_dict(), model.state_dict()


def test_stages_give_each_other_what_the_partition_has_moved(ranks):
    config = {"partitions": 2, "auto_partition": False, "default_partition": 0}
    made = ranks(_moved, 2, None, 1, False, config=config)
    other = [{n: v + 1 if torch.is_tensor(v) else v for n, v in local.items()} for local, _ in made]
    for _, full in ranks(_moved, 2, other, 3, False, config=config):
        assert all(torch.equal(full[name], made[0][1][name] + 1) for name in full)
    with pytest.raises(AssertionError, match=r"missing \['1\.weight'"):
        ranks(_moved, 2, other, 3, True, config=config)


@pytest.mark.parametrize(("name", "sets_gradient"), [("1.weight", False), ("2.running_var", False), ("1.weight", True)])
def test_writing_into_tensors_that_have_no_values_is_refused(ranks, name, sets_gradient):
    def run():
        import smdistributed.modelparallel.torch as smp
        from smp_runtime.errors import SMPUserError

        with smp.delay_param_initialization():
            module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
            nn.init.ones_(module[0].weight)  # recorded
        model = smp.DistributedModel(module)
        tensors = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
        with torch.no_grad():
            if sets_gradient:
                tensors[name].grad = torch.ones_like(tensors[name])
            else:
                tensors[name].mul_(0.5)

        @smp.step
        def step(x):
            model.backward(model(x).square().mean())

        with pytest.raises(SMPUserError, match=f"written into 1 tensors, or their gradients, .*, the first {name}"):
            step(torch.ones(2, 4))

    ranks(run, 2, config={"partitions": 2})
