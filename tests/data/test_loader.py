"""What a loader hands out is what counts: not what workers read ahead, nor what a peek has drawn."""

from __future__ import annotations

import itertools

import pytest
import torch.utils.data as torch_data
from support.ranks.ledger import Numbers, step_blocks

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError


def _sampler(count=40, ranks=1, rank=0, **options):
    return smp.data.DistributedSampler(range(count), ranks, rank, seed=3, **options)


def _stream(count=40, ranks=1, rank=0, **options):
    return smp.data.DistributedStream(Numbers(count), ranks, rank, **options)


@pytest.mark.parametrize("kind", [_sampler, _stream])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_read_ahead_change_neither_order_nor_position(kind, persistent):
    def make(ranks, rank):
        return kind(48, ranks, rank)

    whole, _ = step_blocks(make, 1, 8)
    workers = {"num_workers": 2, "persistent_workers": persistent}
    begun, state = step_blocks(make, 2, 4, steps=8, **workers)
    assert state["epoch"] == 1
    assert state["index"] == 16
    assert begun + step_blocks(make, 1, 8, state=state, **workers)[0] == whole


def test_a_plain_loader_without_workers_counts_too():
    def run(state, steps):
        sampler, found = _sampler(), []
        loader = torch_data.DataLoader(sampler.dataset, 4, sampler=sampler, collate_fn=list)
        if state is not None:
            sampler.load_state_dict(state)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in loader:
                found.append(batch)
                if len(found) == steps:
                    return found, sampler.state_dict()
        return found, sampler.state_dict()

    whole, _ = run(None, 100)
    begun, state = run(None, 13)
    assert state == {"epoch": 1, "index": 12, "seed": 3, "samples": 40}
    assert begun + run(state, 100)[0] == whole


@pytest.mark.parametrize("kind", [_sampler, _stream])
def test_a_plain_loader_that_reads_ahead_is_refused(kind):
    source = kind()
    given = {"sampler": source} if kind is _sampler else {}
    loader = torch_data.DataLoader(getattr(source, "dataset", None) if given else source, 4, num_workers=2, **given)
    with pytest.raises(SMPUserError, match="reads? .*ahead of the training"):
        next(iter(loader))


def test_a_loader_that_was_made_over_the_sampler_and_not_used_does_not_count():
    sampler = _sampler()
    counting = smp.data.DataLoader(sampler.dataset, 4, sampler=sampler)
    next(iter(counting))
    loader = iter(torch_data.DataLoader(sampler.dataset, 4, sampler=sampler))
    next(loader), next(loader)
    assert sampler.state_dict()["index"] == 8
    with pytest.raises(SMPUserError, match="with 2 workers"):
        next(iter(torch_data.DataLoader(sampler.dataset, 4, sampler=counting.sampler, num_workers=2)))


def test_what_no_checkpoint_keeps_may_be_read_ahead():
    loader = torch_data.DataLoader(range(40), 4, sampler=_sampler(kept=False), num_workers=2, collate_fn=list)
    assert sorted(itertools.chain(*loader)) == list(range(40))


def test_a_loader_of_another_kind_is_refused():
    class ReadsAhead(torch_data.DataLoader):
        def __iter__(self):
            return iter([*super().__iter__()])

    with pytest.raises(SMPUserError, match="ReadsAhead with 0 workers draws"):
        iter(ReadsAhead(range(40), 4, sampler=_sampler()))


@pytest.mark.parametrize(
    "given",
    [
        {"sampler": torch_data.SequentialSampler(range(40))},
        {"batch_sampler": [[0, 1], [2]]},
        {"batch_sampler": torch_data.BatchSampler(range(40), 4, False)},
    ],
)
def test_an_order_of_which_nobody_knows_is_refused(given):
    with pytest.raises(SMPUserError, match="nobody could say which samples were trained"):
        smp.data.DataLoader(range(40), **given)


def test_batches_in_any_order_are_refused():
    with pytest.raises(SMPUserError, match="in_order=False"):
        smp.data.DataLoader(range(40), 4, sampler=_sampler(), num_workers=1, in_order=False)


def test_a_data_set_that_divides_itself_among_workers_is_refused():
    stream = smp.data.DistributedStream(
        type("IterableDataset", (Numbers,), {"__module__": "datasets.iterable"})(40), 1, 0
    )
    smp.data.DataLoader(stream, 4)
    with pytest.raises(SMPUserError, match="divides itself among the 2 workers"):
        smp.data.DataLoader(stream, 4, num_workers=2)


@pytest.mark.parametrize("kind", [_sampler, _stream])
def test_a_peek_takes_nothing_away(kind):
    def loader():
        source = kind()
        options = {"sampler": source} if kind is _sampler else {}
        return smp.data.DataLoader(source.dataset if options else source, 4, collate_fn=list, **options)

    whole = list(loader())
    first = loader()
    begun = list(itertools.islice(first, 3))
    second = loader()
    second.load_state_dict(first.state_dict())
    assert next(iter(second)) == whole[3]
    assert begun + list(second) == whole
    assert list(second) == whole, "a pass that was seen to its end is followed by a whole one"


def test_passes_that_a_script_does_not_number_begin_anew_once_they_were_complete():
    loader = smp.data.DataLoader(range(40), 4, sampler=_sampler(), collate_fn=list)
    whole = list(loader)
    other = smp.data.DataLoader(range(40), 4, sampler=_sampler(), collate_fn=list)
    other.load_state_dict(loader.state_dict())
    assert list(other) == whole


def test_short_batches_at_the_end_of_an_epoch_count_as_what_they_are():
    for ranks, samples in ((1, 10), (2, 10), (3, 12)):
        loaders = [
            smp.data.DataLoader(range(10), 4, sampler=_sampler(10, ranks, rank), collate_fn=list)
            for rank in range(ranks)
        ]
        for loader in loaders:
            loader.set_epoch(0)
            list(loader)
            assert loader.state_dict()["index"] == samples


def test_a_last_block_that_is_too_short_for_all_ranks():
    shares = [list(_stream(8, 3, rank)) for rank in range(3)]
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5, 6]]
    assert [list(_stream(8, 3, rank, drop_last=True)) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert len(smp.data.DistributedStream(_Sized(8), 3, 0)) == 3


class _Sized(Numbers):
    def __len__(self):
        return self.count

    def __iter__(self):
        raise AssertionError("read although it can begin anywhere")

    def iter_from(self, index):
        return iter(range(index, self.count))


def test_a_stream_that_can_begin_anywhere_is_not_read_up_to_there():
    stream = smp.data.DistributedStream(_Sized(20), 2, 1)
    stream.load_state_dict({"epoch": 0, "index": 16, "seed": None, "samples": None})
    assert list(stream) == [17, 19]


def test_a_state_says_what_is_wrong_with_it():
    sampler = _sampler()
    good = sampler.state_dict()
    for bad in (
        None,
        {},
        {**good, "index": -1},
        {**good, "epoch": True},
        {**good, "seed": "3"},
        {**good, "index": 2**80},
    ):
        with pytest.raises(SMPUserError, match="has whole numbers for epoch, index, seed and samples"):
            sampler.load_state_dict(bad)
    with pytest.raises(SMPUserError, match="data set of 41 samples, but this one has 40"):
        sampler.load_state_dict({**good, "samples": 41})
    assert sampler.state_dict() == good


def test_the_seed_of_the_job_that_was_saved_counts():
    first = _sampler()
    order = list(first)
    other = smp.data.DistributedSampler(range(40), 1, 0, seed=8)
    assert list(other) != order
    other.load_state_dict({**first.state_dict(), "index": 4})
    assert list(other) == order[4:]


class _Drawing(torch_data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        import torch

        return index, int(torch.randint(10**9, ()))


def test_random_numbers_of_the_script_and_of_workers():
    import torch

    def drawn(rank, ranks):
        sampler = smp.data.DistributedSampler(_Drawing(), ranks, rank, seed=3)
        return list(smp.data.DataLoader(_Drawing(), 4, sampler=sampler, num_workers=2, collate_fn=list))

    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = drawn(0, 2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert drawn(0, 2) == first, "stages of a replica change samples alike"
    own, other = ([number for batch in each for _, number in batch] for each in (first, drawn(1, 2)))
    assert not set(own) & set(other)


def _batches(batch, epochs=1):
    import smdistributed.modelparallel.torch as smp

    loader = smp.data.DataLoader(range(96), batch, shuffle=True, seed=3, collate_fn=list)
    unkept = smp.data.DataLoader(range(96), batch, collate_fn=list, kept=False)
    return [batch for _ in range(epochs) for batch in loader], len(next(iter(unkept))), loader.batch_size


@pytest.mark.parametrize(
    ("former", "batch", "microbatches", "now"),
    [
        (4, 4, 1, 8),  # the global batch of 16 over two ranks
        (3, 4, 2, 6),
        (3, 2, 2, 2),  # three samples cannot be two microbatches: the global batch is smaller, and that is told
        (3, 3, 1, 3),  # 9 samples over two ranks
        (2, 4, 1, 4),
    ],
)
def test_the_global_batch_stays_the_same_with_fewer_ranks(ranks, former, batch, microbatches, now):
    config = {"ddp": True, "microbatches": microbatches}
    found = ranks(_batches, 2, batch, config=config, env={"SMP_READERS_AT_START": str(former)})
    assert [kept for _, kept, _ in found] == [batch] * 2
    assert [size for *_, size in found] == [now] * 2
    steps = [
        sorted(itertools.chain.from_iterable(step)) for step in zip(*(batches for batches, *_ in found), strict=True)
    ]
    order = smp.data.DistributedSampler(range(96), 1, 0, shuffle=True, seed=3)
    whole = list(order)
    assert steps == [sorted(whole[at : at + 2 * now]) for at in range(0, 96, 2 * now)]
