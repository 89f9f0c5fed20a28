"""A job that is resumed reads on where it was: at any topology, from any kind of checkpoint, after any kill."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.ranks.ledger import Numbers, step_blocks
from support.training.checkpoint_training import TOPOLOGIES
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.checkpoint.files.manifest import read_manifest, verify
from smp_runtime.data.position import SourcePositions
from smp_runtime.errors import CheckpointError
from smp_runtime.job import session

SAMPLES, BATCH = 40, 8


def _trained():
    model = smp.DistributedModel(nn.Linear(1, 1))
    return model, smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def _loader(samples=SAMPLES, **options):
    return smp.data.DataLoader(range(samples), BATCH, shuffle=True, seed=3, collate_fn=list, **options)


def _take(loader, count):
    """The batches that a script gets which leaves off in the midst of its epochs."""
    found = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader:
            found.append(batch)
            if len(found) == count:
                return found
    return found


@pytest.mark.parametrize("how", [{}, {"async_save": True}, {"partial": False}])
@pytest.mark.parametrize("made_first", [False, True])
def test_without_a_line_in_the_script(solo, tmp_path, how, made_first):
    solo()
    whole = _take(_loader(), 15)
    model, optimizer = _trained()
    loader = _loader()
    assert _take(loader, 7) == whole[:7]
    smp.save_checkpoint(str(tmp_path), "7", user_content={"a": 1}, **how)
    _take(loader, 15)  # of no concern to what was saved
    session.shutdown()
    del model, optimizer, loader
    solo()
    kept = _trained()
    loader = _loader() if made_first else None
    found = smp.resume_from_checkpoint(str(tmp_path), "7", partial=how.get("partial", True))
    assert found == {"a": 1}
    loader = loader or _loader()
    assert loader.epoch == 1
    assert _take(loader, 15) == whole[7:]
    del kept


def test_several_sources_are_told_apart_by_number_or_name(solo, tmp_path):
    solo()
    kept = _trained()
    first, second, named = _loader(), _loader(16), _loader(24, name="more")
    aside = _loader(8, kept=False)
    _take(first, 1), _take(second, 3), _take(named, 2), _take(aside, 1)
    smp.save_checkpoint(str(tmp_path), "1")
    saved = json.loads((tmp_path / "1_partial" / "data.json").read_text())
    assert {name: (state["epoch"], state["index"]) for name, state in saved.items()} == {
        "0": (0, 8),
        "1": (1, 8),
        "more": (0, 16),
    }
    assert verify(tmp_path / "1_partial", read_manifest(tmp_path / "1_partial")) == []
    session.shutdown()
    del first, second, named, aside, kept
    solo()
    kept = _trained()
    named, first, second = _loader(24, name="more"), _loader(), _loader(16)
    smp.resume_from_checkpoint(str(tmp_path))
    assert [each.state_dict()["index"] for each in (first, second, named)] == [8, 8, 16]
    del kept


def test_weights_alone_begin_a_training_of_their_own(solo, tmp_path):
    solo()
    kept = _trained()
    loader = _loader()
    whole = _take(loader, 15)
    smp.save_checkpoint(str(tmp_path), "1")
    smp.save_checkpoint(str(tmp_path), "whole", partial=False)
    smp.resume_from_checkpoint(str(tmp_path), "1", load_optimizer=False)
    assert _take(loader, 15) == whole
    smp.resume_from_checkpoint(str(tmp_path), "whole", partial=False, load_optimizer=False)
    assert _take(loader, 15) == whole
    del kept


def test_a_job_without_such_data_saves_what_it_did(solo, tmp_path):
    solo()
    kept = _trained()
    smp.save_checkpoint(str(tmp_path), "1")
    smp.save_checkpoint(str(tmp_path), "whole", partial=False, user_content=3)
    assert not (tmp_path / "1_partial" / "data.json").exists()
    assert torch.load(tmp_path / "user_content_whole").keys() == {"_smp_save", "content"}
    loader = _loader()
    smp.resume_from_checkpoint(str(tmp_path), "1")
    assert loader.state_dict()["index"] == 0
    del kept


@pytest.mark.parametrize("partial", [True, False])
def test_another_data_set_is_refused_before_anything_is_loaded(solo, tmp_path, partial):
    solo()
    model, optimizer = _trained()
    loader = _loader()
    _take(loader, 1)
    smp.save_checkpoint(str(tmp_path), "1", partial=partial)
    with torch.no_grad():
        model.module.weight.fill_(5.0)
    del loader
    other = _loader(48)
    with pytest.raises(
        CheckpointError, match="data set '0' cannot go on: .* read a data set of 40 samples, but this one has 48"
    ):
        smp.resume_from_checkpoint(str(tmp_path), "1", partial=partial)
    assert model.module.weight.item() == 5.0
    assert other.state_dict()["index"] == 0
    del optimizer


@pytest.mark.parametrize(
    "text", ["[1]", '{"0": 3}', '{"0": {"epoch": -1, "index": 0, "seed": 0, "samples": 1}}', "{", "[" * 9999]
)
def test_hostile_positions_are_refused(solo, tmp_path, text, monkeypatch):
    solo()
    kept = _trained()
    loader = _loader()
    with monkeypatch.context() as patched:
        patched.setattr(SourcePositions, "state", lambda _: _Text(text))
        patched.setattr(
            json,
            "dumps",
            lambda value, *args, former=json.dumps, **options: (
                value.text if isinstance(value, _Text) else former(value, *args, **options)
            ),
        )
        smp.save_checkpoint(str(tmp_path), "1")
    with pytest.raises(CheckpointError):
        smp.resume_from_checkpoint(str(tmp_path), "1")
    del kept, loader


class _Text:
    def __init__(self, text):
        self.text = text


# -- other topologies --------------------------------------------------------------------------------------------------


def _train(path, tag, steps, kind, save):
    """A job that trains ``steps`` steps more; gives all that the training has consumed so far, and its weights."""
    from itertools import islice

    import torch
    from support.ranks.ledger import Numbers, interleaved
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(1)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    common = smp.state.cfg.prescaled_batch
    reader, readers = (smp.rdp_rank(), smp.rdp_size()) if common else (smp.dp_rank(), smp.dp_size())

    @smp.step
    def step(model, x):
        loss = (model(x) - x.sin()).square().mean()
        model.backward(loss)
        return loss

    options = {"shuffle": True} if kind == "map" else {}
    data = range(40) if kind == "map" else Numbers(40)
    loader = smp.data.DataLoader(data, 8 // readers, seed=3, collate_fn=list, **options)
    done = [] if tag is None else smp.resume_from_checkpoint(path, tag)

    def batches():
        for epoch in range(4):
            loader.set_epoch(epoch)
            yield from loader

    for ids in islice(batches(), steps):
        optimizer.zero_grad()
        step(model, torch.tensor(ids, dtype=torch.float32, device=smp.state.device)[:, None] / 40)
        optimizer.step()
        read = dict(smp.allgather((reader, ids), smp.WORLD))
        assert all(read[place] == given for place, given in smp.allgather((reader, ids), smp.WORLD))
        done = [*done, interleaved([read[place] for place in range(readers)])]
    smp.save_checkpoint(path, tag=save, user_content=done)
    return done, {name: value.float().cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize(
    "chain",
    [
        ["pp2", "tp2", "one", "tp2-o2"],
        pytest.param(["o2", "s2", "pp2-tp2", "dp2", "pp4", "s2-dp2"], marks=pytest.mark.full),
        pytest.param(["tp2-s2", "one", "pp2-o2", "s4", "tp4", "pp2"], marks=pytest.mark.full),
    ],
)
def test_other_topologies_consume_the_same_samples_in_each_step(ranks, tmp_path, kind, chain):
    steps = 12 // len(chain)
    (whole, weights), *_ = ranks(_train, 1, str(tmp_path), None, 12, kind, "whole", config={})
    loaders = step_blocks(
        lambda n, r: smp.data.DistributedSampler(range(40), n, r, seed=3)
        if kind == "map"
        else smp.data.DistributedStream(Numbers(40), n, r),
        1, 8, epochs=4, steps=12,
    )  # fmt: skip
    assert whole == loaders[0]
    tag = None
    for number, name in enumerate(chain):
        world, config = TOPOLOGIES[name]
        found = ranks(_train, world, str(tmp_path), tag, steps, kind, str(number), config=config)
        tag = str(number)
    for done, _ in found:
        assert done == whole
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)


# -- kills -------------------------------------------------------------------------------------------------------------

#: Forks jobs of one or two ranks, and kills each at some moment until one comes to its end; prints how many it took.
_KILLER = """
import json, os, random, signal, sys, time
from datetime import timedelta
os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", TORCHELASTIC_USE_AGENT_STORE="True")
import torch
import torch.distributed as dist
import smdistributed.modelparallel.torch as smp
from support.ranks.ledger import Numbers, interleaved
torch.set_num_threads(1)
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # imports for seconds, once instead of in every job

def job(rank, world, number, path, seed, pipe):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), TORCHELASTIC_RESTART_COUNT=str(number))
    smp.init({"ddp": True, "shard_optimizer_state": True} if world > 1 else {})
    chance = random.Random(seed)
    kind, workers, every = ["map", "stream"][seed % 2], [0, 2, 2, 0][seed % 4], chance.choice([1, 2, 3])
    model = smp.DistributedModel(torch.nn.Linear(60, 1, bias=False))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    with torch.no_grad():
        model.module.weight.zero_()

    @smp.step
    def step(model, x):
        model.backward(-12 * model(x).mean())

    data, more = (range(60), {"shuffle": True}) if kind == "map" else (Numbers(60), {})
    loader = smp.data.DataLoader(data, 12 // world, seed=seed, num_workers=workers, collate_fn=list, **more)
    done = smp.resume_from_checkpoint(path) if os.path.exists(path + "/newest") else []
    for epoch in range(3):
        loader.set_epoch(epoch)
        for ids in loader:
            optimizer.zero_grad()
            step(model, torch.nn.functional.one_hot(torch.tensor(ids), 60).float())
            optimizer.step()
            done.append(interleaved(smp.allgather(ids, smp.DP_GROUP)))
            if len(done) % every == 0:
                smp.save_checkpoint(path, tag=str(len(done)), user_content=done, num_kept_partial_checkpoints=2,
                                    async_save=chance.random() < 0.5)
            if rank == 0:
                os.write(pipe, b"%d " % len(done))
    smp.save_checkpoint(path, tag="last", user_content=done)
    smp.shutdown()

root, seeds = sys.argv[1], json.loads(sys.argv[2])
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
os.environ["MASTER_PORT"] = str(store.port)
number = 0
for seed in seeds:
    chance = random.Random(f"{seed} kills")
    kills = 0
    while True:
        number += 1
        world, doomed = chance.choice([1, 2]), kills < 3
        reading, writing = os.pipe()
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    os.close(reading)
                    job(rank, world, number, f"{root}/{seed}", seed, writing)
                    code = 0
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            pids.append(pid)
        os.close(writing)
        said = b""
        wanted = chance.randint(1, 6)
        while doomed and said.count(b" ") < wanted and (more := os.read(reading, 100)):
            said += more
        if doomed:
            time.sleep(chance.uniform(0.0, 0.02))
            chance.shuffle(pids)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        while os.read(reading, 1000):
            pass
        os.close(reading)
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        if not any(codes):
            break
        assert doomed and all(code in (0, 9, 256) for code in codes), codes
        kills += 1
    print(json.dumps([seed, kills]), flush=True)
"""


@pytest.mark.job
@pytest.mark.parametrize("jobs", [2, pytest.param(60, marks=[pytest.mark.full, pytest.mark.timeout(1500)])])
def test_the_ledger_of_killed_jobs_is_that_of_the_undisturbed_one(solo, tmp_path, jobs):
    first = random.SystemRandom().randrange(2**30)
    seeds = list(range(first, first + jobs))
    print(f"seeds {first} to {first + jobs - 1}")
    command = [sys.executable, "-c", _KILLER, str(tmp_path), json.dumps(seeds)]
    packages = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60 + 20 * jobs, env={**os.environ, "PYTHONPATH": packages}
    )
    assert ended.returncode == 0, ended.stderr
    outcomes = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [seed for seed, _ in outcomes] == seeds
    assert sum(kills for _, kills in outcomes) >= 2 * jobs, outcomes
    solo()
    model = smp.DistributedModel(nn.Linear(60, 1, bias=False))
    smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    for seed, kills in outcomes:
        is_map = seed % 2 == 0

        def make(ranks, rank, is_map=is_map, seed=seed):
            if is_map:
                return smp.data.DistributedSampler(range(60), ranks, rank, seed=seed, kept=False)
            return smp.data.DistributedStream(Numbers(60), ranks, rank, kept=False)

        whole, _ = step_blocks(make, 1, 12, epochs=3)
        done = smp.resume_from_checkpoint(str(tmp_path / str(seed)), load_optimizer=False)
        assert done == whole, f"seed {seed}, {kills} kills"
        # Every sample has added 1 to its own weight: what was trained, whatever the ledger says.
        assert model.module.weight.flatten().tolist() == [3.0] * 60, f"seed {seed}, {kills} kills"
