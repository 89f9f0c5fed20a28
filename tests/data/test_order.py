"""The order of samples: PyTorch's, the same in every step at any number of ranks, and the same after any stop."""

from __future__ import annotations

import random

import pytest
from support.matrix import examples
from support.ranks.ledger import Numbers, step_blocks
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import NotInitializedError, SMPUserError


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_samples_of_pytorchs_sampler(shuffle, drop_last):
    for samples in (0, 1, 2, 3, 7, 12, 25):
        for ranks in (1, 2, 3, 5):
            for rank in range(ranks):
                given = (range(samples), ranks, rank, shuffle, 7, drop_last)
                if samples == 0 and not drop_last:
                    continue  # PyTorch's divides by zero
                theirs, ours = TorchSampler(*given), smp.data.DistributedSampler(*given)
                assert len(ours) == len(theirs)
                for epoch in (0, 3):
                    theirs.set_epoch(epoch)
                    ours.set_epoch(epoch)
                    assert list(ours) == list(theirs), given


def test_it_takes_the_place_of_pytorchs():
    sampler = smp.data.DistributedSampler(range(5), 2, 1)
    assert isinstance(sampler, TorchSampler)
    with pytest.raises(SMPUserError, match="rank is 2 and num_replicas 2, but ranks count from 0 to 1"):
        smp.data.DistributedSampler(range(5), 2, 2)
    with pytest.raises(NotInitializedError):
        smp.data.DistributedSampler(range(5))


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_stopped_at_any_step_on_any_ranks_it_is_the_undisturbed_run(kind):
    stops = 0
    for case in range(examples(150, 500)):
        chance = random.Random(f"{case} {kind}")
        samples, drop = chance.randint(24, 130), chance.random() < 0.5
        if not drop:
            samples -= samples % 12  # what fills up the last step depends on the number of ranks

        def make(ranks, rank, samples=samples, drop=drop, seed=case):
            if kind == "map":
                return smp.data.DistributedSampler(range(samples), ranks, rank, True, seed, drop)
            return smp.data.DistributedStream(Numbers(samples), ranks, rank, drop)

        whole, _ = step_blocks(make, 1, 12, drop_last=drop)
        assert len(whole) == 2 * (samples // 12)
        assert len(set(map(tuple, whole))) == len(whole)
        found, state, more = [], None, whole
        while more:
            ranks = chance.choice([1, 2, 3, 4, 6])
            more, state = step_blocks(make, ranks, 12 // ranks, state=state, steps=chance.randint(1, 6), drop_last=drop)
            found += more
            stops += 1
        assert found == whole, f"case {case}"
    assert stops > examples(600, 2000)
