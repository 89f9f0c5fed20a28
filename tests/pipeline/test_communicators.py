"""Communicators of pipelines: only between stages that send each other tensors, made by these two ranks alone."""

from __future__ import annotations

import pytest
import torch

Pair = tuple[int, int]
#: Longer than anything here takes, even on a busy machine.
PATIENCE = 50.0


def _train(stages: int) -> tuple[int, list[Pair]]:
    """Train a chain of layers with gloo in NCCL's place, each on a stage of its own; the step function is on stage 0.

    Returns:
        How often this rank has called ``new_group`` since the job began, and the pairs of stages that it has connected, source
        first.
    """
    from unittest import mock

    import torch.distributed as dist
    from support.training.pipeline_training import summing_step
    from torch import nn

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.model import stages as of_model

    with (
        mock.patch.object(of_model, "channel_backend", return_value="gloo"),
        mock.patch.object(dist, "new_group") as made,
    ):
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(stages)))
        for stage, layer in enumerate(net):
            smp.set_partition(layer, stage)
        model = smp.DistributedModel(net)
        train = summing_step(model)
        for _ in range(2):
            train(torch.ones(4, 4))
        transport = model._stages.pipeline.transport
        connected = [(transport.stage, peer.stage) for peer in transport._peers.values() if peer.opens]
        transport.flush(PATIENCE)
        assert [peer.out[1].is_open for peer in transport._peers.values()] == [
            peer.opens for peer in transport._peers.values()
        ]
    return made.call_count, connected


def _talking(stages: int) -> list[Pair]:
    """Return the pairs of a chain that send each other tensors: 9 of 12 with four stages, 21 of 56 with eight."""
    forward = {(stage, stage + 1) for stage in range(stages - 1)}
    backward = {(later, stage) for stage, later in forward}
    outputs = {(0, stage) for stage in range(1, stages)}  # of the step function, for the scripts of all ranks
    loss = {(stages - 1, 0)}
    return sorted(forward | backward | outputs | loss)


def _check(results: list[tuple[int, list[Pair]]], stages: int, pipelines: int) -> None:
    assert [calls for calls, _ in results] == [0] * len(
        results
    )  # all ranks made stages * (stages - 1) * pipelines groups
    connected = sorted(pair for _, pairs in results for pair in pairs)
    assert connected == sorted(_talking(stages) * pipelines)


def _config(stages: int) -> dict[str, object]:
    return {"partitions": stages, "auto_partition": False, "default_partition": 0, "microbatches": 2, "ddp": True}


@pytest.mark.parametrize(("stages", "pipelines"), [(2, 2), (4, 1)])
def test_only_stages_that_talk_have_a_communicator(ranks, stages, pipelines):
    _check(ranks(_train, stages * pipelines, stages, config=_config(stages)), stages, pipelines)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("stages", "pipelines"), [(4, 2), (8, 1)])
def test_only_stages_that_talk_have_a_communicator_on_eight_ranks(stages, pipelines):
    from support.ranks.rank_pool import RankPool

    with RankPool(8) as pool:
        _check(pool.run(_train, 8, stages, config=_config(stages), timeout=240), stages, pipelines)
