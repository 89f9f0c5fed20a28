"""The two runs of ``smp-estimator verify``: the same batches, no dropout, a few updates; and what it says of planted errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.platform.command_line import call, flat
from torch import nn

from smp_config import ConfigError
from smp_estimator.numerics.comparison import compare
from smp_estimator.numerics.recorded_run import RecordedRun
from smp_estimator.numerics.verification import NO_DROPOUT, Verification
from smp_records.numerics import Trial
from smp_tools.numerics.trial import disable_dropout


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.3
        self.drop_path = 0.2
        self.rate = 0.4
        self.layers = nn.ModuleList([nn.Dropout(0.5), nn.Dropout2d(0.0), nn.AlphaDropout(0.1)])


def test_dropout_of_layers_and_of_numbers_that_modules_keep() -> None:
    module = _Own()
    assert disable_dropout(module) == ["attention_dropout", "drop_path", "layers.0.p", "layers.2.p"]
    assert (module.attention_dropout, module.drop_path, module.rate) == (0.0, 0.0, 0.4)
    assert disable_dropout(module) == []


def _train(config: dict[str, Any], per_rank: bool) -> tuple[int, int]:
    """A script as people write it, with dropout, without an end; its batches are per rank or parts of one batch."""
    import torch
    from support.training.numerics_training import Decoder, batch_of, loss_of, part

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.job.session import current_session

    smp.init(config)  # here, since what hears of it must be imported first
    module = Decoder()  # weights by the trial's seed
    for block in module.blocks:
        block.dropout.p = 0.5
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @smp.step(input_split_axes={"turned": 1}, non_split_inputs=["scale"])
    def step(ids: torch.Tensor, others: dict[str, Any], scale: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(ids) * scale, others["targets"]) + 0.0 * turned.float().mean()
        model.backward(loss)
        return loss

    try:
        for number in range(50):
            whole = batch_of(number + (100 * smp.dp_rank() if per_rank else 0), 4 if per_rank else 8)
            ids, targets = whole if per_rank else part(whole, smp.dp_rank(), smp.dp_size())
            optimizer.zero_grad()
            step(ids, {"targets": targets, "name": "a"}, torch.tensor(0.5), ids.t())
            optimizer.step()
    except SystemExit as ended:
        return int(ended.code or 0), current_session().progress.step
    return -1, current_session().progress.step


@pytest.mark.parametrize("per_rank", [True, False])
def test_one_process_trains_on_the_batches_of_the_ranks(
    ranks: Callable[..., Any], tmp_path: Path, per_rank: bool
) -> None:
    batches = str(tmp_path / "batches")
    runs = {
        "two": (2, {"ddp": True, "microbatches": 2}, Trial(2, 5, save=batches)),
        "one": (1, {}, Trial(2, 5, replay=batches)),
    }
    for name, (world, config, trial) in runs.items():
        folder = tmp_path / name
        env = {
            "SMP_NUMERICS_TRIAL": trial.to_text(),
            "SMP_RECORD_NUMERICS": str(folder),
            "SMP_RECORD_NUMERICS_EVERY": "1",
        }
        assert set(ranks(_train, world, config, per_rank, init=False, env=env)) == {(0, 2)}
    one, two = (RecordedRun.read(str(tmp_path / name)) for name in ("one", "two"))
    found = compare(one, two)
    assert found.is_equal
    assert sum(each.key.phase == "loss" for each in found.compared) == 2
    inputs = [total for total in one.moments[0, 0].values() if total.key.phase == "input"]
    assert [total.elements for total in inputs] == [8 * 6]


def test_what_is_run() -> None:
    planned = Verification.plan(
        "a.py", ("--x",), {"sharded_data_parallel_degree": 2, "ddp": True, "bf16": True}, None, 4, 7, Path("f")
    )
    assert (planned.wanted.processes, planned.alone.processes) == (2, 1)
    assert planned.alone.parameters == {"microbatches": 1, "bf16": True}
    assert planned.wanted.parameters["sdp_gradient_clipping"] == 1e30
    assert (planned.wanted.trial.save, planned.alone.trial.replay) == ("f/batches", "f/batches")
    assert planned.notes[0] == NO_DROPOUT
    assert "not clipped to sdp_gradient_clipping (1)" in planned.notes[1]
    processes = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "ddp": True}
    assert Verification.plan("a.py", (), processes, None, 1, 0, Path("f")).wanted.processes == 8
    assert Verification.plan("a.py", (), processes, 4, 1, 0, Path("f")).wanted.processes == 4
    assert Verification.plan("a.py", (), {"partitions": 2}, None, 1, 0, Path("f")).wanted.processes == 2
    both = {"ddp": True, "sharded_data_parallel_degree": 4, "context_parallel_degree": 6}
    assert Verification.plan("a.py", (), both, None, 1, 0, Path("f")).wanted.processes == 12
    with pytest.raises(ConfigError):
        Verification.plan("a.py", (), processes, 3, 1, 0, Path("f"))


_SCRIPT = """
import sys
import torch, torch.nn.functional as F
import smdistributed.modelparallel.torch as smp

fault = sys.argv[1]
smp.init()
net = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 50))
model = smp.DistributedModel(net, average_grads_across_microbatches=fault != "sum")
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
samples = torch.randint(50, (256, 5), generator=torch.Generator().manual_seed(1))
where = {} if fault == "sampler" else {"rank": smp.dp_rank(), "num_replicas": smp.dp_size()}
where = where or {"rank": 0, "num_replicas": smp.dp_size()}
sampler = torch.utils.data.DistributedSampler(samples, shuffle=False, **where)
loader = torch.utils.data.DataLoader(samples, batch_size=8, sampler=sampler)

@smp.step
def train_step(ids):
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    model.backward(loss)
    return loss

for ids in loader:
    optimizer.zero_grad()
    train_step(ids)
    optimizer.step()
print("the script went on", flush=True)
sys.exit(3)
"""


@pytest.mark.job
@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "parameters", "code", "said"),
    [
        (
            "sampler",
            '{"ddp": true}',
            1,
            "differs first at step 0, rank(s) 0, 1: input of the model; in the wanted degrees the replicas [0, 1] have read the "
            "same batch",
        ),
        (
            "sum",
            '{"microbatches": 4}',
            1,
            # The exact error is 3/4; projections say it within some 25 %.
            "differs first at step 0, rank(s) 0: output gradient of 3; relative error 0.87",
        ),
        ("none", '{"ddp": true, "microbatches": 2}', 0, "equal within rounding"),
        ("none", '{"partitions": 2, "microbatches": 2, "ddp": true}', 0, "equal within rounding"),
    ],
)
def test_verify_says_what_is_wrong_and_where(tmp_path: Path, fault: str, parameters: str, code: int, said: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    picture = tmp_path / "growth.svg"
    words = ("--parameters", parameters, "--steps", "2", "--picture", str(picture), "--", fault)
    found = flat(call("verify", str(script), *words, code=code))
    assert said in found
    assert "losses of one process" in found
    assert "dropout was set to 0 in both runs" in found
    if fault == "sum":
        assert "the second run has 4 times the norm: a loss or gradient that is not divided by 4 microbatches" in found
    assert picture.read_text().startswith("<?xml")


def test_verify_shows_the_end_of_a_run_that_failed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise KeyError('the script is broken')\n")
    said = flat(call("verify", str(script), "--parameters", "{}", code=1))
    assert "ended with exit code 1" in said
    assert "the script is broken" in said


def test_verify_wants_a_script_that_records(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('nothing')\n")
    assert "has recorded nothing" in flat(call("verify", str(script), "--parameters", "{}", code=1))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    said = call("verify", str(script), "--parameters", "{}", "--folder", str(tmp_path / "full"), code=1)
    assert "is not empty" in flat(said)
