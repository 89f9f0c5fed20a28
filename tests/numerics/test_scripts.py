"""Ways in which scripts train: without steps, with checkpointed activations; all are recorded as the plain training is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.matrix import sampled
from support.training.numerics_training import DEGREES

from smp_estimator.numerics.comparison import compare
from smp_estimator.numerics.recorded_run import RecordedRun
from smp_estimator.numerics.report import write_verdict
from smp_records.numerics import PHASES


def _train(folder: str, config: dict[str, Any], kind: str, every: int) -> int:
    import torch
    from support.training.numerics_training import Decoder, batch_of, loss_of, part

    import smdistributed.modelparallel.torch as smp

    smp.init(config)
    torch.manual_seed(0)
    module = Decoder()
    if kind == "wrapped first":
        model = smp.DistributedModel(module)
        smp.record_numerics(folder, every=every)
    else:
        smp.record_numerics(folder, every=every)
        model = smp.DistributedModel(module)
    smp.record_numerics("elsewhere")  # it has begun already
    if kind == "checkpointed":
        for block in module.blocks:
            smp.set_activation_checkpointing(block)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def microbatch(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(ids), targets)
        model.backward(loss)
        return loss

    step = microbatch if kind == "without steps" else smp.step(microbatch)
    for number in range(4):
        optimizer.zero_grad()
        step(*part(batch_of(number), smp.dp_rank(), smp.dp_size()))
        optimizer.step()
    return len(list(Path(folder).glob("*.jsonl"))) if smp.rank() == 0 else 0


def _recorded(ranks: Callable[..., Any], folder: Path, degrees: str, kind: str, every: int = 1) -> RecordedRun:
    world, config = DEGREES[degrees]
    ranks(_train, world, str(folder), config, kind, every, init=False)
    return RecordedRun.read(str(folder))


@pytest.mark.parametrize(
    ("kind", "degrees"),
    sampled(
        [
            *(("without steps", degrees) for degrees in ("one", "dp", "sdp", "tp-own")),
            *(("checkpointed", degrees) for degrees in ("one", "mb", "dp", "pp", "sdp", "tp-own")),
            *(("wrapped first", degrees) for degrees in ("one", "pp", "dp")),
        ],
        [("without steps", "dp"), ("checkpointed", "pp"), ("wrapped first", "one")],
    ),
)
def test_all_of_it_is_recorded(ranks: Callable[..., Any], tmp_path: Path, kind: str, degrees: str) -> None:
    one = _recorded(ranks, tmp_path / "one", "one", "plain")
    found = compare(one, _recorded(ranks, tmp_path / "other", degrees, kind))
    assert found.is_equal, write_verdict(found)
    lacking = {"loss"} if kind == "without steps" else set()  # which nobody is told
    assert {each.key.phase for each in found.compared} == set(PHASES) - lacking
    modules = {each.key.name for each in found.compared if each.key.phase == "output gradient"}
    assert {"norm", "head"} <= modules
    if not degrees.startswith("tp"):
        assert {"blocks.0.attention.qkv", "blocks.1.mlp.2"} <= modules
    assert {each.step for each in found.compared} == {0, 1, 2, 3}


def test_every_second_update_is_recorded(ranks: Callable[..., Any], tmp_path: Path) -> None:
    found = compare(
        _recorded(ranks, tmp_path / "one", "one", "plain"), _recorded(ranks, tmp_path / "other", "dp", "plain", every=2)
    )
    assert found.is_equal
    assert {each.step for each in found.compared} == {0, 2}
    assert not (tmp_path / "elsewhere").exists()
