"""Jobs killed with SIGKILL while they save: what is left is always a whole checkpoint, at most one save old."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.checkpoint.files.manifest import verify, whole_checkpoints
from smp_runtime.job import session

#: Forks jobs of one or two ranks that save without end, and kills them; prints what each had saved for certain.
_KILLER = """
import json, os, random, signal, sys, time, traceback
from datetime import timedelta
os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", TORCHELASTIC_USE_AGENT_STORE="True")
import torch
import torch.distributed as dist
import smdistributed.modelparallel.torch as smp
torch.set_num_threads(1)
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # imports for seconds, once instead of in every job

def job(rank, world, case, path, in_background, tags, pipe, saves=sys.maxsize):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), TORCHELASTIC_RESTART_COUNT=str(case))
    smp.init({"ddp": True, "shard_optimizer_state": True} if world > 1 else {})
    model = smp.DistributedModel(torch.nn.Linear(300, 300))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for n in range(saves):
        with torch.no_grad():
            model.module.weight.fill_(n)
        smp.save_checkpoint(path, tag=str(n % tags), user_content=n, num_kept_partial_checkpoints=2, async_save=in_background)
        if in_background:
            smp.wait_for_checkpoint()
        if rank == 0:
            os.write(pipe, b"%d " % n)

root, seeds = sys.argv[1], json.loads(sys.argv[2])
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
os.environ["MASTER_PORT"] = str(store.port)
# Once here what every job would import at its first saves.
null = os.open(os.devnull, os.O_WRONLY)
for in_background in (False, True):
    job(0, 1, f"first{in_background}", f"{root}/first", in_background, 1, null, saves=1)
    smp.shutdown()
for case, seed in enumerate(seeds, 1):
    chance = random.Random(seed)
    world, in_background = chance.choice([1, 2]), chance.random() < 0.5
    tags = chance.choice([1, 2, 3])  # with one or two, saves replace folders of the same name
    reading, writing = os.pipe()
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(null, 1)
                os.dup2(os.open(f"{root}/{seed}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
                job(rank, world, case, f"{root}/{seed}", in_background, tags, writing)
            except BaseException:
                traceback.print_exc()  # nobody else does: the process ends here
            finally:
                os._exit(1)
        pids.append(pid)
    os.close(writing)
    said = os.read(reading, 100)
    if not said:
        # 9 is a kill that is not from here, such as for want of memory.
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        raise SystemExit(f"seed {seed}: ranks ended with {ends} before the first save: " + open(f"{root}/{seed}.log").read())
    time.sleep(chance.uniform(0.0, 0.1))
    chance.shuffle(pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        time.sleep(chance.choice([0.0, 0.005]))
    while more := os.read(reading, 1000):
        said += more
    os.close(reading)
    for pid in pids:
        os.waitpid(pid, 0)
    print(json.dumps([seed, world, in_background, int(said.split()[-1])]), flush=True)
"""


@pytest.mark.job
@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
def test_killed_at_any_moment_the_newest_is_whole_and_at_most_one_save_old(tmp_path, kills):
    first = random.SystemRandom().randrange(2**30)
    seeds = list(range(first, first + kills))
    print(f"seeds {first} to {first + kills - 1}")
    command = [sys.executable, "-c", _KILLER, str(tmp_path), json.dumps(seeds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80 + 6 * kills)
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == kills
    session.init({})
    try:
        model = smp.DistributedModel(nn.Linear(300, 300))
        smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for seed, world, in_background, saved in outcomes:
            folder = tmp_path / str(seed)
            content = smp.resume_from_checkpoint(str(folder))
            where = f"seed {seed}, {world} ranks, async {in_background}, saved {saved}: {os.listdir(folder)}"
            assert content in (saved, saved + 1), where
            assert torch.all(model.module.weight == content), where
            for found in whole_checkpoints(folder):
                assert found.manifest is not None
                assert verify(found.folder, found.manifest) == [], where
    finally:
        session.shutdown()
