"""What a rehearsal counts: storages that are alive, collectives, and what modules do."""

import gc
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smp_records.rate_card import Measured
from smp_runtime.activations import offloading
from smp_runtime.tensors.torch_private import absent_store
from smp_tools.rehearsal.counters import Counters
from smp_tools.rehearsal.fake_collectives import (
    AbsentCollectives,
    CollectiveLedger,
    CountedCollectives,
    DirectCollectives,
)
from smp_tools.rehearsal.memory import LiveMemory, RankPhase, by_kind
from smp_tools.rehearsal.phases import Phases
from smp_tools.rehearsal.skip_compute_mode import SkipComputeMode
from smp_tools.rehearsal.work import ModuleTimes, TimedWork, WorkClock

FORWARD = RankPhase("forward", "blocks.1")


@pytest.fixture
def memory():
    return LiveMemory(lambda: FORWARD)


def test_storages_count_from_their_making_until_nobody_holds_them(memory):
    with SkipComputeMode([memory]):
        first = torch.zeros(1000)
        second = first + 1
        view = second[10:]
        del second
        assert memory.now == 8000
        del view
        assert memory.now == 4000
        assert first.numel() == 1000
    assert memory.peak == 8000


def test_the_peak_names_what_was_alive_then_also_if_it_is_gone(memory):
    with SkipComputeMode([memory]):
        kept, gone = torch.zeros(100), torch.ones(300)
        memory.mark("parameter", [kept])
        del gone
        later = torch.zeros(50)
    holders = memory.at_peak()
    assert by_kind(holders) == {"parameter": 400, "activation": 1200}
    assert [(one.module, one.operation, one.bytes) for one in holders] == [
        ("blocks.1", "ones.default", 1200),
        ("blocks.1", "zeros.default", 400),
    ]
    assert later.numel() == 50


def test_a_storage_that_is_emptied_in_place_counts_with_what_is_left(memory):
    with SkipComputeMode([memory]):
        tensor = torch.zeros(256)
        other = torch.zeros(1)
        tensor.untyped_storage().resize_(0)
        memory.resized(tensor.untyped_storage())
        assert memory.now == 4
        assert sum(one.bytes for one in memory.at_peak()) == memory.peak == 1028
        tensor.untyped_storage().resize_(2048)
        memory.resized(tensor.untyped_storage())
    assert memory.now == memory.peak == 2052
    assert sum(one.bytes for one in memory.at_peak()) == 2052
    assert other.numel() == 1


def test_the_curve_has_each_kind_from_the_beginning_of_the_step_and_keeps_its_highest_point():
    moments = iter(range(10_000))
    memory = LiveMemory(lambda: FORWARD, lambda: float(next(moments)))
    with SkipComputeMode([memory]):
        weights = torch.zeros(25)
        memory.mark("parameter", [weights])
        memory.begin_curve()
        for number in range(1000):
            torch.zeros(1000 if number == 501 else 1)
    curve = memory.curve()
    assert set(curve.owners) == {"parameter", "activation"}
    assert set(curve.owners["parameter"]) == {100}
    assert max(curve.owners["activation"]) == 4000
    assert len(curve.seconds) == len(curve.owners["activation"]) <= 400
    assert curve.seconds == sorted(curve.seconds)


def test_main_memory_is_no_memory_of_the_gpu(memory):
    with SkipComputeMode([memory]):
        kept = torch.zeros(100)
        with memory.in_host_memory():
            away = torch.zeros(1000)
        assert (memory.now, memory.host_now) == (400, 4000)
        back = away.clone()
        del away
    assert (memory.now, memory.peak) == (4400, 4400)
    assert (memory.host_now, memory.host_peak) == (0, 4000)
    assert by_kind(memory.at_peak()) == {"activation": 4400}
    memory.watch_peak()
    assert memory.host_peak == 0
    assert kept.numel() + back.numel() == 1100


def test_storages_in_main_memory_are_emptied_and_filled(memory):
    with SkipComputeMode([memory]):
        with memory.in_host_memory():
            away = torch.zeros(1000)
        for elements, now in ((0, 0), (1500, 6000)):
            away.untyped_storage().resize_(4 * elements)
            memory.resized(away.untyped_storage())
            assert (memory.now, memory.host_now) == (0, now)
        assert (memory.peak, memory.host_peak) == (0, 6000)
        assert memory.at_peak() == []
        del away
    assert memory.host_now == 0


def test_offloaded_activations_wait_in_main_memory(memory):
    offloader = offloading.Offloader(1, torch.device("cpu"), lambda: ((None, ()), None, None))
    offloading.in_host_memory.append(memory.in_host_memory)
    try:
        with SkipComputeMode([memory]):
            x = torch.ones(100, requires_grad=True)
            stored = offloader.store(x * 2)
            assert (memory.now, memory.host_now) == (800, 0)
            stored.leave()
            assert (memory.now, memory.host_now) == (400, 400)
            stored.load()
            assert (memory.now, memory.host_now) == (800, 400)
            assert stored.take("").sum() == 200
    finally:
        offloading.in_host_memory.pop()


def test_the_most_that_one_microbatch_holds_is_of_its_forward_pass():
    at = {"where": FORWARD, "microbatch": None}
    memory = LiveMemory(lambda: at["where"])
    memory.microbatch = lambda: at["microbatch"]
    held = {}
    with SkipComputeMode([memory]):
        weights = torch.zeros(1000)
        for at["microbatch"], size in enumerate((10, 30, 20)):
            held[at["microbatch"]] = [torch.zeros(size), torch.zeros(size)]
        at.update(where=RankPhase("backward", ""), microbatch=1)
        gradient = torch.zeros(500)
        held[1].pop()
    assert memory.most_of_microbatch == 4 * 60
    memory.watch_peak()
    assert memory.most_of_microbatch == 4 * 40
    assert weights.numel() + gradient.numel() == 1500


def test_modules_are_named_in_forward_and_in_the_backward_of_their_nodes():
    phases = Phases()
    seen = set()

    class Look:
        def performed(self, operation):
            seen.add((operation.function.__name__, phases.where().phase, phases.where().module))

    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        phases.name(model)
        with SkipComputeMode([Look()]):
            model(torch.ones(2, 4)).sum().backward()
    finally:
        phases.close()
    assert ("addmm.default", "forward", "0") in seen
    assert ("tanh_backward.default", "backward", "1") in seen
    assert ("mm.default", "backward", "2") in seen
    assert ("mm.default", "backward", "1") not in seen


def test_backward_on_another_thread_than_forward_knows_its_modules_and_nothing_is_kept():
    """As in a pipeline, where each task may have a thread of its own."""
    phases = Phases()
    memory = LiveMemory(phases.where)
    seen = []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    gc.disable()  # what goes only with the garbage would be counted until then
    try:
        phases.name(model)

        class Look:
            def performed(self, operation):
                seen.append((operation.function.__name__, phases.where().phase, phases.where().module))

        outputs = []

        def forward():
            with SkipComputeMode([memory, Look()]):
                outputs.append(model(torch.ones(2, 4)))

        def backward():
            with SkipComputeMode([memory, Look()]), torch.autograd.set_multithreading_enabled(False):
                outputs.pop().sum().backward()

        for work in (forward, forward, backward, backward):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        model.zero_grad()
        assert memory.now == 0
    finally:
        gc.enable()
        phases.close()
    backwards = [(name, module) for name, phase, module in seen if phase == "backward"]
    assert backwards.count(("mm.default", "2")) == backwards.count(("mm.default", "0")) + 2 == 4
    assert backwards.count(("threshold_backward.default", "1")) == 2


@pytest.fixture
def four():
    """The second of four ranks that are not there."""
    dist.init_process_group("fake", store=absent_store(), rank=1, world_size=4)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_collectives_with_absent_ranks_are_counted_and_give_what_equal_ranks_would(four):
    ledger = CollectiveLedger(lambda: FORWARD)
    ledger.name_of = lambda group: ("dp", 2)
    done = CountedCollectives(AbsentCollectives(buffers=False), ledger)
    tensor = torch.tensor([1.0, 0.0, 3.0, 0.0])
    done.all_reduce(tensor, four).wait()
    assert tensor.tolist() == [4, 0, 12, 0]
    whole, shard = torch.zeros(8), torch.tensor([1.0, 2.0])
    done.all_gather(whole, shard, four).wait()
    assert whole.tolist() == [1, 2] * 4
    done.reduce_scatter(shard, torch.arange(8.0), four).wait()
    assert shard.tolist() == [8, 12]
    rows = {one.kind: one for one in ledger.counts()}
    assert (rows["all_reduce"].payload_bytes, rows["all_reduce"].sent_bytes, rows["all_reduce"].messages) == (16, 24, 6)
    assert (rows["all_gather"].payload_bytes, rows["all_gather"].sent_bytes, rows["all_gather"].hosts) == (32, 24, 2)
    assert (rows["reduce_scatter"].payload_bytes, rows["reduce_scatter"].sent_bytes) == (32, 24)


def test_what_a_script_asks_of_torch_itself_is_counted_once(four):
    ledger = CollectiveLedger(lambda: FORWARD)
    direct = DirectCollectives(ledger)
    done = CountedCollectives(AbsentCollectives(buffers=False), ledger)
    direct.counted = done.counted
    with SkipComputeMode([], direct):
        dist.all_reduce(torch.zeros(10))
        dist.broadcast(torch.zeros(5), 0)
        done.all_reduce(torch.zeros(10), four)
    assert {one.kind: (one.calls, one.payload_bytes) for one in ledger.counts()} == {
        "all_reduce": (2, 80),
        "broadcast": (1, 20),
    }


class Rates:
    """A second for each operation on numbers, or for each byte."""

    def seconds_of_work(self, flops, moved, dtype):
        return flops


def test_modules_work_is_that_of_their_operations():
    clock = WorkClock()
    times = ModuleTimes(lambda: FORWARD, Rates(), clock)
    with SkipComputeMode([times]):
        torch.zeros(2, 3) @ torch.zeros(3, 5)
    found = {one.dtype: one for one in times.rows()}["float32"]
    assert found.flops == found.seconds == clock.now == 2 * 2 * 3 * 5
    assert found.bytes == 4 * (6 + 15) + 4 * (6 + 15 + 10)


def test_measured_durations_are_spread_over_the_operations_of_a_module_as_the_rates_say():
    inside, beside = RankPhase("forward", "blocks.1.mlp.0"), RankPhase("forward", "blocks.10")
    at = {"where": inside, "microbatch": 0}
    measured = [
        Measured(path="blocks.1.mlp", phase="forward", seconds=6.0, count=1),
        Measured(path="blocks.2", phase="forward", seconds=7.0, count=1),
        Measured(path="blocks.1.mlp", phase="backward", seconds=8.0, count=1),
    ]
    clock = WorkClock()
    times = ModuleTimes(lambda: at["where"], Rates(), clock, measured)
    times.microbatch = lambda: at["microbatch"]
    small, large = (torch.zeros(1, 1),) * 2, (torch.zeros(1, 2), torch.zeros(2, 1))
    for step in range(2):
        times.begin()
        began = clock.now
        with SkipComputeMode([times]):
            for at["microbatch"] in range(3):
                torch.mm(*small), torch.mm(*large)  # 2 and 4 operations
                at["where"] = beside  # blocks.10, which is not of blocks.1
                torch.mm(*small)
                at["where"] = inside
            at["microbatch"] = None
            torch.mm(*small)  # of no microbatch
        # By the rates first, since it was not known how many operations there are.
        assert clock.now - began == (3 * 8 + 2 if step == 0 else 3 * (6 + 2) + 2)
        assert times.measured_seconds == (0 if step == 0 else 18)
    with SkipComputeMode([times]):
        at["microbatch"] = 0
        torch.mm(*small)
    assert clock.now - began == 3 * (6 + 2) + 2 + 2
    assert {row.module: row.seconds for row in times.rows()} == {"blocks.1.mlp.0": 18 + 2 + 2, "blocks.10": 6}


def test_a_collective_lets_the_rank_compute_until_it_is_waited_for():
    clock = WorkClock()
    works = [TimedWork(AbsentCollectives(buffers=False).broadcast(torch.zeros(1), 0, None), clock, 3.0) for _ in "12"]
    clock.advance(2.0)
    works[0].wait()
    assert clock.now == 3.0
    clock.advance(1.0)
    works[1].wait()
    assert clock.now == 6.0


def test_what_was_made_and_freed_before_the_first_step_is_not_reserved():
    memory = LiveMemory(lambda: RankPhase("start", ""))
    large, small = torch.empty(2**24), torch.empty(2**8)
    for tensor in (large, small):
        memory._note(tensor.untyped_storage(), "empty")
    assert memory.reserved == 2**26 + 2**21
    del large, tensor
    gc.collect()
    memory.begin_reserving()
    assert memory.reserved == 2**21
    memory._note(torch.empty(2**22).untyped_storage(), "empty")  # freed at once
    assert memory.reserved == 2**24 + 2**21
    again = torch.empty(2**22 - 2**19)
    memory._note(again.untyped_storage(), "empty")  # takes the block that was freed
    assert memory.reserved == 2**24 + 2**21


def test_the_first_step_begins_what_is_reserved():
    counters = Counters(3, None)
    try:
        large = torch.empty(2**24)
        counters.memory._note(large.untyped_storage(), "empty")
        del large
        gc.collect()
        assert counters.memory.reserved == 2**26
        counters._begin_step()
        assert counters.memory.reserved == 0
        kept = torch.empty(2**24)
        counters.memory._note(kept.untyped_storage(), "empty")
        del kept
        gc.collect()
        counters._begin_step()  # what the first one has freed stays reserved
        assert counters.memory.reserved == 2**26
    finally:
        counters.phases.close()
