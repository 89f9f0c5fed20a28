"""Communicators of pipelines: only between stages that send each other tensors, made by these two ranks alone."""

from __future__ import annotations

import pytest
import torch

from smp_estimator.planning.memory.communicators import talking_stages

Pair = tuple[int, int]
#: Longer than anything here takes, even on a busy machine.
PATIENCE = 50.0


def _train(stages: int) -> tuple[int, list[Pair]]:
    """Train a chain of layers with gloo in NCCL's place, each on a stage of its own; the step function is on the last one.

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


def _check(results: list[tuple[int, list[Pair]]], stages: int, pipelines: int) -> None:
    assert [calls for calls, _ in results] == [0] * len(results)  # else each rank makes all groups of all pipelines
    connected = sorted(pair for _, pairs in results for pair in pairs)
    assert connected == sorted([*talking_stages(stages)] * pipelines)


def _config(stages: int) -> dict[str, object]:
    return {
        "partitions": stages,
        "auto_partition": False,
        "default_partition": stages - 1,
        "microbatches": 2,
        "ddp": True,
    }


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
