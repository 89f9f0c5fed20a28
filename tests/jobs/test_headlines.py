"""Which rank a failed job names: the one that met the error, whoever else was told of it and raises it too."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from smp_launch.failures.failure import FailureCollector
from smp_records.records import FailureRecord

PACKAGES = Path(__file__).resolve().parents[2] / "container"
PATIENCE = 60.0

#: The first rank of each pipeline traces, unless it is told otherwise; what fails is the words' first, the rank their second.
SCRIPT = """
import sys
import torch
import smdistributed.modelparallel.torch as smp
from smp_runtime.checkpoint import folder_transaction, save_partial

what, where = sys.argv[1], int(sys.argv[2])

def fails(before):
    def failing(*words, **more):
        if before is not None:
            before(*words, **more)
        raise LookupError("broken here")
    return failing

class Part(torch.nn.Module):
    def forward(self, x):
        if what == "module":
            raise LookupError("broken here")
        return x

smp.init()
model = smp.DistributedModel(torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)], Part()))
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))

@smp.step
def step(x):
    if what == "function":
        raise LookupError("broken here")
    loss = model(x).sum()
    model.backward(loss)
    return loss

step(torch.ones(4, 4))
optimizer.step()
if smp.rank() == where and what == "partial":
    save_partial.contents_of = fails(save_partial.contents_of)
if smp.rank() == where and what == "publish":
    folder_transaction.FolderTransaction._publish = fails(None)
if smp.rank() == where and what == "full":
    optimizer.full_state_dict = fails(optimizer.full_state_dict)
smp.save_checkpoint("checkpoints", tag="t", partial=what != "full", model=model, optimizer=optimizer)
"""

CASES = [
    # That fit() names the rank is always asked in tests/pipeline/test_errors.py.
    pytest.param(
        "module",
        1,
        2,
        {"pipeline_parallel_degree": 2, "tracing_rank": 1},
        id="tracing, a module",
        marks=pytest.mark.full,
    ),
    pytest.param(
        "function",
        1,
        2,
        {"pipeline_parallel_degree": 2, "tracing_rank": 1},
        id="tracing, the step function",
        marks=pytest.mark.full,
    ),
    pytest.param("partial", 1, 2, {}, id="partial", marks=pytest.mark.full),
    pytest.param("partial", 3, 4, {"pipeline_parallel_degree": 2}, id="partial, four ranks", marks=pytest.mark.full),
    pytest.param("partial", 1, 2, {"pipeline_parallel_degree": 2}, id="partial, a stage", marks=pytest.mark.full),
    pytest.param("publish", 0, 2, {}, id="publishing", marks=pytest.mark.full),
    pytest.param("full", 1, 2, {}, id="full, replicas", marks=pytest.mark.full),
    # The other stage waits for weights of the rank that failed.
    pytest.param("full", 1, 2, {"pipeline_parallel_degree": 2}, id="full, a stage", marks=pytest.mark.full),
]


@pytest.mark.job
@pytest.mark.parametrize(("what", "where", "size", "parameters"), CASES)
def test_the_headline_names_the_rank_that_met_the_error(tmp_path, what, where, size, parameters):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    given = str({"ddp": True, "microbatches": 2, **parameters}).replace("'", '"').replace("True", "true")
    command = [sys.executable, "-m", "smp_launch", "run", "--processes", str(size), "--parameters", given]
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("SM_", "SMP_", "SLURM", "OMPI"))
    }
    done = subprocess.run(
        [*command, "--failure-file", "failure", "train.py", what, str(where)],
        env={**environ, "PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1", "SMP_HOST": "here"},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode != 0
    headline, _, detail = (tmp_path / "failure").read_text().partition("\n")
    assert headline.startswith(f"rank {where} (here): "), headline
    assert "LookupError: broken here" in headline
    assert "Traceback" in detail
    assert "train.py" in detail


def _origin_of_a_failed_save(folder, partial):
    import torch

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.checkpoint import save_partial
    from smp_runtime.errors import CheckpointError

    model = smp.DistributedModel(torch.nn.Linear(4, 4))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    before = save_partial.contents_of, optimizer.full_state_dict

    def fails(*words, **more):
        before[not partial](*words, **more)
        raise LookupError("broken here")

    if smp.rank() == 1 and partial:
        save_partial.contents_of = fails
    elif smp.rank() == 1:
        optimizer.full_state_dict = fails
    try:
        smp.save_checkpoint(folder, tag="t", partial=partial, model=model, optimizer=optimizer)
    except CheckpointError as error:
        record = FailureRecord.of(smp.rank(), "elsewhere", error, "its traceback")
        return record.rank, record.error_type, record.message, record.traceback
    finally:
        save_partial.contents_of, optimizer.full_state_dict = before
    return None


@pytest.mark.parametrize("partial", [True, False])
def test_every_rank_tells_the_rank_that_could_not_save(ranks, tmp_path, partial):
    for rank, kind, message, traceback in ranks(
        _origin_of_a_failed_save, 2, str(tmp_path), partial, config={"ddp": True}
    ):
        assert (rank, kind, traceback) == (1, "CheckpointError", "its traceback")
        assert "(rank 1: LookupError: broken here)" in message


def _first_of(*told):
    """The headline of what ranks tell: rank, class of the error, its words, and whom it accuses; in the order of their clocks."""
    collector = FailureCollector(str)
    collector.records = [
        FailureRecord(rank=rank, error_type=kind, message=message, when=1.0 + number, accused=accused)
        for number, (rank, kind, message, accused) in enumerate(told)
    ]
    return collector.first_cause(1).headline


def test_who_only_heard_of_another_s_end_is_never_the_cause():
    """Its host's clock is behind."""
    heard = 0, "RankLeftError", "rank 1 failed while rank 0 is in smp.barrier; the error …", (1,)
    assert _first_of(heard, (1, "LookupError", "broken here", ())) == "rank 1: LookupError: broken here"
    assert _first_of(heard).startswith("rank 1 (1): RankLeftError: as rank 0 tells: rank 1 failed")


def test_of_ranks_that_heard_of_one_another_the_end_of_the_chain_is_named():
    """On a host whose ranks were told by one of another host, whose own record is not here."""
    found = _first_of(
        (0, "StageError", "rank 1 (pipeline stage 1) has ended its script or called …", (1,)),
        (1, "RankLeftError", "rank 3 failed while rank 1 is in …", (3,)),
    )
    assert found.startswith("rank 3 (3): RankLeftError: as rank 1 tells: rank 3 failed")


@pytest.mark.parametrize(
    ("ended", "headline"), [({0}, "the job was stopped by SIGTERM"), (set(), "rank 1: SMPRuntimeError")]
)
def test_a_rank_that_was_stopped_before_it_could_save_is_the_cause(ended, headline):
    collector = FailureCollector(lambda rank: "here", mpirun=False)
    collector.records = [FailureRecord(rank=1, error_type="SMPRuntimeError", message="the store is gone", when=1.0)]
    assert headline in collector.first_cause(143, "SIGTERM", "train.py", 0, ended).headline
