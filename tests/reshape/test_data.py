"""What a job reads goes on at the same place, in batches of the same size for all ranks together."""

from __future__ import annotations

import pytest
from support.training.reshape_training import settings_of

SAMPLES, BATCH = 50, 4


def _consumed(kind, workers, changes):
    """The samples of every step on this rank."""
    import multiprocessing

    from support.ranks.ledger import Numbers

    import smdistributed.modelparallel.torch as smp

    multiprocessing.current_process()._config["daemon"] = False  # the pool's ranks are, and may have no workers then
    data = Numbers(SAMPLES) if kind == "stream" else list(range(SAMPLES))
    loader = smp.data.DataLoader(
        data,
        BATCH,
        shuffle=None if kind == "stream" else True,
        num_workers=workers,
        collate_fn=list,
        multiprocessing_context="fork" if workers else None,
    )
    steps = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            steps.append((smp.tp_rank(), smp.dp_rank() if not smp.state.cfg.prescaled_batch else smp.rdp_rank(), batch))
            if len(steps) in changes:
                smp.reshape(settings_of(changes[len(steps)]))
    return steps


def _ledger(outcomes):
    """By step, the samples of all readers in the order of the job."""
    found = []
    for step in zip(*outcomes, strict=True):
        readers = {place: batch for _, place, batch in step}
        batches = [readers[place] for place in sorted(readers)]
        found.append([sample for each in zip(*batches, strict=True) for sample in each])
    return found


@pytest.mark.parametrize(("kind", "workers"), [("map", 0), ("map", 2), ("stream", 0)])
def test_every_sample_is_read_once_and_in_its_order(ranks, kind, workers):
    changes = {2: "tp2-s2", 3: "s4", 5: "pp4"}
    expected = _ledger(ranks(_consumed, 4, kind, workers, {}, config=settings_of("dp2")))
    found = _ledger(ranks(_consumed, 4, kind, workers, changes, config=settings_of("dp2")))
    assert [len(step) for step in expected][:3] == [4 * BATCH] * 3
    assert [len(step) for step in found][: len(expected) - 1] == [len(step) for step in expected][:-1]
    whole = 3 * 4 * BATCH  # what is behind it is padded to the number of ranks
    for epoch in range(2):
        first = epoch * 4
        flat = [sample for step in found[first : first + 4] for sample in step]
        assert flat[:whole] == [sample for step in expected[first : first + 4] for sample in step][:whole]
        assert set(flat) == set(range(SAMPLES))


def _of_its_own():
    import smdistributed.modelparallel.torch as smp

    own = smp.data.DistributedSampler(list(range(12)), num_replicas=3, rank=1)
    loader = smp.data.DataLoader(list(range(12)), 3)
    with pytest.raises(ValueError, match="2 ranks read batches of 3, 6 samples together, which 4 ranks"):
        smp.reshape(settings_of("dp2"))
    smp.reshape(settings_of("pp4"))
    return (own.num_replicas, own.rank), (loader.source.num_replicas, loader.batch_size_here)


def test_a_sampler_with_numbers_of_its_own_stays_and_uneven_batches_are_refused(ranks):
    assert ranks(_of_its_own, 4, config=settings_of("tp2-s2")) == [((3, 1), (1, 6))] * 4
