"""Ranks that share one emulated device: results are those of one process, over gloo and NCCL, and a missing wait is found."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from support.matrix import sampled
from support.training import shared_device_training
from support.training.closeness import close
from support.training.shared_device_training import STRATEGIES, TOLERANCE

import smp_launch

#: Those that always run, with one order of work.
SAMPLE = {("dp 2", "gloo"), ("sdp 2", "nccl"), ("pp 2", "gloo"), ("pp 2 x tp 2", "gloo"), ("sharded state 4", "nccl")}
BACKENDS = ("gloo", "nccl")
SEEDS = range(1, 51)
#: A wait that is missing must be found in so many of the orders.
FOUND_IN = 45

REDUCING = ("smp_runtime.comm.buckets:Reducing.finish", "self._work.wait()", "pass")
GATHERING = ("smp_runtime.sharding.gather_scheduler:GatherScheduler._finish", "work.wait()", "pass")
MISSING = {"dp 2": REDUCING, "sdp 2": GATHERING, "dp 4": REDUCING}


@pytest.fixture(scope="module")
def plain():
    return shared_device_training.train_plain()


def _compare(found, plain, name, backend):
    assert all(each["device"] == "cuda:0" for each in found)
    assert {each["backend"] for each in found} == {"gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"}
    for each in found:
        assert each["losses"] == pytest.approx(plain["losses"], rel=TOLERANCE)
        assert each["weights"].keys() == plain["weights"].keys()
        for key, value in plain["weights"].items():
            close(each["weights"][key], value, f"{name} over {backend}: {key}", TOLERANCE)


@pytest.mark.parametrize(("name", "backend"), sampled(product(STRATEGIES, BACKENDS), SAMPLE))
def test_results_are_those_of_one_process(ranks, plain, name, backend):
    _compare(ranks(shared_device_training.run, STRATEGIES[name][0], name, 1, backend, init=False), plain, name, backend)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_in_fifty_orders(ranks, plain, name, backend):
    seeds = list(SEEDS)
    found = ranks(shared_device_training.run_seeds, STRATEGIES[name][0], name, seeds, backend, init=False, timeout=1700)
    for each in zip(*found, strict=True):
        _compare(each, plain, name, backend)


def _faulty(name, seed, backend, fault):
    from support.faults.planted import planted

    with planted(*fault):
        return shared_device_training.run(name, seed, backend)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.full)])
def test_a_missing_wait_is_found(ranks, backend):
    from support.ranks.rank_pool import RankFailed

    with pytest.raises(RankFailed, match="nothing orders two accesses"):
        ranks(_faulty, 2, "dp 2", 3, backend, REDUCING, init=False)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MISSING)
def test_a_missing_wait_is_found_in_most_orders(ranks, name, backend):
    from support.ranks.rank_pool import RankFailed

    found = 0
    for seed in SEEDS:
        try:
            ranks(_faulty, STRATEGIES[name][0], name, seed, backend, MISSING[name], init=False)
        except RankFailed as error:
            found += "nothing orders two accesses" in str(error) or "given back" in str(error)
    assert found >= FOUND_IN, f"{found} of {len(SEEDS)}"


SCRIPT = """
import torch
import smdistributed.modelparallel.torch as smp

smp.init({"ddp": True})
model = smp.DistributedModel(torch.nn.Linear(4, 2))

@smp.step
def step(x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

step(torch.ones(4, 4, device="cuda"))
print("rank", smp.rank(), smp.state.device, smp.state.backend, torch.cuda.device_count(), flush=True)
"""


@pytest.mark.full
@pytest.mark.job
@pytest.mark.parametrize(("backend", "chosen"), [("gloo", "gloo"), ("nccl", "cpu:gloo,cuda:nccl")])
def test_ranks_of_a_launcher_share_one_device(tmp_path, backend, chosen):
    (tmp_path / "train.py").write_text(SCRIPT)
    asked = {"SMP_EMULATE_CUDA": "checked", "SMP_EMULATE_CUDA_DEVICES": "1", "SMP_SHARED_GPU": backend}
    environ = {**os.environ, "PYTHONPATH": str(Path(smp_launch.__file__).parents[1]), **asked}
    command = [sys.executable, "-m", "smp_launch", "run", "--processes", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} cuda:0 {chosen} 1" in done.stdout
    assert (done.stdout + done.stderr).count("share a GPU") == 1


def test_there_is_one_warning_on_one_rank(ranks):
    (first, second) = ranks(_warned, 2, init=False)
    assert len(first) == 1
    assert "ranks 0, 1 share a GPU (2 ranks see 1 GPU in all)" in first[0]
    assert not second


def _warned():
    import logging

    messages = []

    class Kept(logging.Handler):
        def emit(self, record):
            if record.levelno >= logging.WARNING and "share a GPU" in record.getMessage():
                messages.append(record.getMessage())

    handler = Kept()
    logging.getLogger("smp").addHandler(handler)
    try:
        shared_device_training.run("dp 2", 1, "gloo")
    finally:
        logging.getLogger("smp").removeHandler(handler)
    return messages
