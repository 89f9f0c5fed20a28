"""Loaders that Accelerate divides: what they resume by themselves, and what is not divided twice."""

from __future__ import annotations

import itertools

import pytest
import torch.utils.data as torch_data

import smdistributed.modelparallel.torch as smp
from smp_integrations.shared_order import refuse_divided
from smp_runtime.errors import SMPUserError

SAMPLES, BATCH = 48, 8


def _prepared(skipped):
    """The samples of each step of a script for Accelerate that goes on behind some."""
    import torch
    from accelerate import Accelerator

    import smdistributed.modelparallel.torch as smp

    accelerator = Accelerator(cpu=True)
    loader = torch_data.DataLoader(
        range(SAMPLES),
        batch_size=BATCH // accelerator.num_processes,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(5),
    )
    loader = accelerator.prepare(loader)
    loader.set_epoch(1)
    if skipped:
        loader = accelerator.skip_first_batches(loader, skipped)
    return [sorted(itertools.chain(*smp.allgather(batch.tolist(), smp.DP_GROUP))) for batch in loader]


def test_accelerate_goes_on_in_the_same_order_on_any_number_of_ranks(ranks):
    whole, *_ = ranks(_prepared, 1, 0, config={})
    assert sorted(itertools.chain(*whole)) == list(range(SAMPLES))
    for found in ranks(_prepared, 2, 2, config={"ddp": True}):
        assert found == whole[2:]


def _twice():
    from accelerate import Accelerator

    import smdistributed.modelparallel.torch as smp

    Accelerator(cpu=True).prepare(smp.data.DataLoader(range(8), 2))


def test_what_is_divided_already_is_not_divided_again(ranks):
    with pytest.raises(AssertionError, match=r"reads a smp\.data\.DistributedSampler, which has divided the samples"):
        ranks(_twice, 2, config={"ddp": True})
    sampler = smp.data.DistributedSampler(range(8), 2, 0)
    stream = smp.data.DistributedStream(range(8), 2, 0)
    for loader in (torch_data.DataLoader(range(8), 2, sampler=sampler), torch_data.DataLoader(stream, 2)):
        with pytest.raises(SMPUserError, match="Accelerate would divide them once more"):
            refuse_divided(loader)
    refuse_divided(torch_data.DataLoader(range(8), 2, shuffle=True))
