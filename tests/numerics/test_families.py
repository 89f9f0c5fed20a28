"""Families of Transformers train equal at all degrees, as their recorded numbers say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp_estimator.numerics.comparison import compare
from smp_estimator.numerics.recorded_run import RecordedRun
from smp_estimator.numerics.report import write_verdict

DEGREES: dict[str, dict[str, Any]] = {
    "pp": {"pipeline_parallel_degree": 2, "microbatches": 4},
    "sdp": {
        "ddp": True,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 0,
        "sdp_gradient_clipping": 1e9,
    },
    "tp": {"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True},
}


def _train(family: str, folder: str, config: dict[str, Any]) -> None:
    import torch
    from support.models.huggingface import tiny_model

    import smdistributed.modelparallel.torch as smp

    smp.init(config)
    smp.record_numerics(folder, every=1)
    torch.manual_seed(0)
    with smp.tensor_parallelism(smp.tp_size() > 1):
        module = tiny_model(family, 32)
    model = smp.DistributedModel(module.train())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    @smp.step
    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=labels)["loss"]
        model.backward(loss)
        return loss

    common = smp.state.cfg.prescaled_batch
    reader, readers = (smp.rdp_rank(), smp.rdp_size()) if common else (smp.dp_rank(), smp.dp_size())
    for number in range(3):
        ids = torch.randint(3, 32, (8, 9), generator=torch.Generator().manual_seed(number)).chunk(readers)[reader]
        optimizer.zero_grad()
        step(ids, ids)
        optimizer.step()


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "llama", "gptneox", "opt", "bert", "t5"])
def test_families_are_equal_at_all_degrees(ranks: Callable[..., Any], tmp_path: Path, family: str) -> None:
    ranks(_train, 1, family, str(tmp_path / "one"), {}, init=False)
    one = RecordedRun.read(str(tmp_path / "one"))
    for name, config in DEGREES.items():
        ranks(_train, 2, family, str(tmp_path / name), config, init=False)
        found = compare(one, RecordedRun.read(str(tmp_path / name)))
        assert found.is_equal, (name, write_verdict(found))
        if name == "tp":  # some models are replaced by the library's own, whose modules have other names
            assert len(found.compared) >= 18
        else:
            assert len(found.alone) < 4
            assert len(found.compared) > 400
