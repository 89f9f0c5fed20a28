"""``smp.auto_resume``: what is saved when a job is asked to stop, and that the next job goes on as if nothing had been."""

from __future__ import annotations

import signal

import pytest
import torch
from support.training.checkpoint_training import TOPOLOGIES

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import CheckpointError, SMPUserError


def _job(folder, total, loop, stop_at=None, **options):
    """One job: losses and rates of all steps so far, its parameters, and whether it was stopped.

    Args:
        loop: ``steps``, or ``range`` for a plain loop.
        stop_at: the step in which the last rank gets SIGTERM.
    """
    import os
    import signal

    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(3)
    module = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)) for _ in range(4)])
    smp.set_tensor_parallelism(module, smp.tp_size() > 1)
    model = smp.DistributedModel(module)
    torch.manual_seed(4 + smp.dp_rank())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    own = {"losses": []}
    progress = smp.auto_resume(model, optimizer, folder=folder, user_content=own, scheduler=scheduler, **options)
    first = progress.step

    @smp.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    try:
        for number in progress.steps(total) if loop == "steps" else range(progress, total):
            x = torch.randn(4, 6)  # drawn before the step begins, where a plain loop saves
            optimizer.zero_grad()
            loss = step(x)
            if number == stop_at and smp.rank() == smp.size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            optimizer.step()
            scheduler.step()
            own["losses"].append((float(loss.reduce_mean()), optimizer.param_groups[0]["lr"]))
    except SystemExit as end:
        assert end.code == 0
        return first, own["losses"], None
    finally:
        if stop_at is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return first, own["losses"], [p.detach().clone() for p in model.local_parameters()]


def _stopped_and_resumed(run, folder, config, loop, total=400, **options):
    """Losses and parameters by rank of a job that was stopped and the one that went on, and of one that never was."""
    stopped = run(_job, str(folder), total, loop, 3, config=config, **options)
    assert all(parameters is None for *_, parameters in stopped)
    steps = len(stopped[0][1])
    assert [len(losses) for _, losses, _ in stopped] == [steps] * len(stopped)
    assert 4 <= steps < total
    assert (folder / "newest").read_text().strip() == f"step{steps}_partial"
    resumed = run(_job, str(folder), steps + 4, loop, config=config, **options)
    assert {first for first, *_ in resumed} == {steps}
    return resumed, run(_job, str(folder.with_name("undisturbed")), steps + 4, loop, config=config, **options)


@pytest.mark.parametrize(("topology", "loop"), [("dp2", "steps"), ("pp2", "range")])
def test_a_job_goes_on_bit_for_bit(ranks, tmp_path, topology, loop):
    world, config = TOPOLOGIES[topology]
    config = {**config, "microbatches": 2}  # the sum of two gradients is the same in either order

    def run(function, *args, config):
        return ranks(function, world, *args, config=config)

    for resumed, undisturbed in zip(*_stopped_and_resumed(run, tmp_path / "job", config, loop), strict=True):
        # Losses of rank 0 are in the checkpoint.
        count = len(undisturbed[1])
        assert resumed[1][-4:] == undisturbed[1][-4:]
        assert len(resumed[1]) == count
        assert all(torch.equal(a, b) for a, b in zip(resumed[2], undisturbed[2], strict=True))


def test_a_plain_loop_saves_what_belongs_to_the_step(solo, tmp_path):
    """The scheduler's step comes after the optimizer's, and the next batch is drawn before the next step."""

    def run(function, *args, config):
        smp.shutdown()
        solo(config)
        return [function(*args)]

    resumed, undisturbed = _stopped_and_resumed(run, tmp_path / "job", {}, "range")
    assert resumed[0][1] == undisturbed[0][1]
    assert all(torch.equal(a, b) for a, b in zip(resumed[0][2], undisturbed[0][2], strict=True))


def test_another_topology_goes_on(ranks, solo, tmp_path):
    world, config = TOPOLOGIES["pp2"]
    stopped = ranks(_job, world, str(tmp_path), 400, "steps", 3, config=config)
    steps = len(stopped[0][1])
    solo({})
    first, losses, _ = _job(str(tmp_path), steps + 2, "steps")
    assert first == steps
    assert losses[:steps] == stopped[0][1]
    assert [rate for _, rate in losses] == [pytest.approx(0.01 * 0.9 ** ((step + 1) // 2)) for step in range(steps + 2)]


def test_checkpoints_of_every_few_steps(solo, tmp_path):
    solo({})
    _job(str(tmp_path), 6, "steps", every=2, num_kept_partial_checkpoints=None, async_save=True)
    smp.wait_for_checkpoint()
    assert sorted(p.name for p in tmp_path.glob("*_partial")) == ["step2_partial", "step4_partial"]
    smp.shutdown()
    solo({})
    _job(str(tmp_path / "plain"), 6, "range", every=2)
    assert sorted(p.name for p in (tmp_path / "plain").glob("*_partial")) == ["step2_partial", "step4_partial"]


@pytest.mark.parametrize("loop", ["steps", "plain"])
def test_data_goes_on_behind_what_was_trained(wrapped, tmp_path, loop):
    """A batch that was read for the step that does not begin is read again."""

    def job(folder, steps, stop_at=None):
        run, seen = wrapped(), []
        loader = smp.data.DataLoader(list(range(60)), batch_size=2, shuffle=True)
        progress = smp.auto_resume(run.model, run.optimizer, folder=folder, scheduler=run.scheduler)
        numbers = progress.steps(steps) if loop == "steps" else range(progress, steps)
        try:
            # The number first: a batch is read in the turn that trains with it.
            for number, batch in zip(numbers, loader, strict=False):
                if number == stop_at:
                    signal.raise_signal(signal.SIGTERM)
                run.train(1)
                seen.append(batch.tolist())
        except SystemExit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return seen

    first = job(tmp_path / "stopped", 20, stop_at=7)
    assert len(first) == 8
    second = job(tmp_path / "stopped", 20)
    assert first + second == job(tmp_path / "undisturbed", 20)


class _Wrapped:
    """A model and an optimizer of one process."""

    def __init__(self) -> None:
        self.model = smp.DistributedModel(torch.nn.Linear(4, 4))
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), lr=0.01))
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 3])

        @smp.step
        def step(x):
            self.model.backward(self.model(x).square().mean())

        self.step = step

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.step(torch.randn(2, 4))
            self.optimizer.step()
            self.scheduler.step()


@pytest.fixture
def wrapped(solo):
    def make():
        smp.shutdown()
        solo({})
        return _Wrapped()

    return make


def test_states_of_other_names_are_refused_or_begin_anew(wrapped, tmp_path, caplog):
    run = wrapped()
    progress = smp.auto_resume(run.model, run.optimizer, folder=tmp_path, every=1, schedule=run.scheduler)
    for _ in progress.steps(3):
        run.train(1)
    run = wrapped()
    with pytest.raises(CheckpointError, match="no state of scheduler and one of schedule"):
        smp.auto_resume(run.model, run.optimizer, folder=tmp_path, scheduler=run.scheduler)
    run = wrapped()
    progress = smp.auto_resume(run.model, run.optimizer, folder=tmp_path, strict=False, scheduler=run.scheduler)
    assert (progress.step, progress.resumed, run.scheduler.last_epoch) == (2, True, 0)
    run = wrapped()
    progress = smp.auto_resume(run.model, run.optimizer, folder=tmp_path, schedule=run.scheduler)
    assert run.scheduler.last_epoch == 2
    assert list(range(progress, 4)) == [2, 3]


def test_a_loss_scaler_goes_on(wrapped, tmp_path):
    run = wrapped()
    scaler = smp.amp.GradScaler(init_scale=8.0)
    progress = smp.auto_resume(run.model, run.optimizer, folder=tmp_path, every=1, scaler=scaler)
    for _ in progress.steps(2):
        run.train(1)
    run = wrapped()
    scaler = smp.amp.GradScaler(init_scale=2.0)
    smp.auto_resume(run.model, run.optimizer, folder=tmp_path, scaler=scaler)
    assert scaler.get_scale() == 8.0


def test_a_checkpoint_of_the_script_is_refused_or_counted_by_updates(wrapped, tmp_path):
    run = wrapped()
    run.train(2)
    smp.save_checkpoint(str(tmp_path), tag="2", user_content={"step": 2})
    run = wrapped()
    with pytest.raises(CheckpointError, match=r"not saved by smp\.auto_resume"):
        smp.auto_resume(run.model, run.optimizer, folder=tmp_path)
    run = wrapped()
    progress = smp.auto_resume(run.model, run.optimizer, folder=tmp_path, strict=False)
    assert (progress.step, progress.user_content) == (2, {"step": 2})


def test_what_cannot_be_saved_is_refused(wrapped, tmp_path):
    run = wrapped()
    with pytest.raises(SMPUserError, match="got a Linear and a"):
        smp.auto_resume(run.model.module, run.optimizer)
    with pytest.raises(SMPUserError, match="every is 0 steps"):
        smp.auto_resume(run.model, run.optimizer, every=0)
    with pytest.raises(SMPUserError, match="epoch= of smp.auto_resume is an int"):
        smp.auto_resume(run.model, run.optimizer, epoch=3)
    smp.auto_resume(run.model, run.optimizer, folder=tmp_path)
    with pytest.raises(SMPUserError, match="called a second time"):
        smp.auto_resume(run.model, run.optimizer, folder=tmp_path)
    other = smp.DistributedOptimizer(torch.optim.SGD(run.model.parameters(), lr=0.1))
    with pytest.raises(SMPUserError, match="1 and 2 are alive"):
        smp.auto_resume(run.model, other)


# -- without a line in the script --------------------------------------------------------------------------------------


@pytest.fixture
def automatic(monkeypatch, tmp_path):
    monkeypatch.setenv("SMP_AUTO_CHECKPOINT", "1")
    monkeypatch.setenv("SMP_CHECKPOINT_DIR", str(tmp_path))
    former = signal.getsignal(signal.SIGTERM)
    yield tmp_path / "auto"
    signal.signal(signal.SIGTERM, former)


def test_a_script_without_a_line_gets_its_model_back(automatic, wrapped, caplog):
    run = wrapped()
    run.train(3)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        run.train(2)
    assert end.value.code == 0
    assert (automatic / "newest").read_text().strip() == "step4_partial"
    kept = [p.detach().clone() for p in run.model.parameters()], run.optimizer.state_dict()
    run = wrapped()
    assert not all(torch.equal(a, b) for a, b in zip(run.model.parameters(), kept[0], strict=True))
    seen = []

    @smp.step
    def step(x):
        seen.extend(p.detach().clone() for p in run.model.parameters())

    step(torch.zeros(1))
    assert all(torch.equal(a, b) for a, b in zip(seen, kept[0], strict=True))
    assert run.optimizer.state_dict()["state"].keys() == kept[1]["state"].keys()
    assert "go on after step 4" in caplog.text
    assert "such as its count of steps, schedulers" in caplog.text


def test_a_script_that_stops_or_resumes_by_itself_is_left_alone(automatic, wrapped, tmp_path, caplog):
    run = wrapped()
    own = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        run.train(1)
        assert "it handles SIGTERM itself" in caplog.text
        smp.save_checkpoint(str(tmp_path), tag="1")
    finally:
        signal.signal(signal.SIGTERM, own)
    run = wrapped()
    smp.resume_from_checkpoint(str(tmp_path))
    run.train(1)
    assert "it resumes by itself" in caplog.text
    run = wrapped()
    loader = smp.data.DataLoader(list(range(8)))
    run.train(1)
    assert "what it reads with smp.data goes on by smp.auto_resume alone" in caplog.text
    assert len(loader) == 8
    assert signal.getsignal(signal.SIGTERM) is own
    assert not automatic.exists()


def test_what_is_automatic_needs_one_of_each(automatic, wrapped, monkeypatch, solo):
    run = wrapped()
    other = smp.DistributedOptimizer(torch.optim.SGD(run.model.parameters(), lr=0.1))
    with pytest.raises(SMPUserError, match="SMP_AUTO_CHECKPOINT=1 saves one .* the script has 1 and 2"):
        run.train(1)
    del other
    monkeypatch.setenv("SMP_AUTO_CHECKPOINT", "yes")
    smp.shutdown()
    with pytest.raises(ValueError, match="SMP_AUTO_CHECKPOINT is 'yes'; set it to 1"):
        solo({})
