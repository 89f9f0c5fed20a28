"""What emulated devices show beside results: a limit of memory, contexts, and steps that wait for the host."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
import torch
from support.ranks.emulated import on_devices
from torch import nn

from smp_config.errors import ConfigError
from smp_config.machine import emulation
from smp_emulation import checked, devices, installing
from smp_emulation.gpu_model.contexts import OWNER_VARIABLE, Contexts
from smp_emulation.gpu_model.launches import StepWork, count_launches
from smp_emulation.gpu_model.model import GpuModel, stream_of_pool

KIB, MIB, GIB = 2**10, 2**20, 2**30
aten = torch.ops.aten


# -- the limit -----------------------------------------------------------------------------------------------------


def test_the_limit_is_a_size():
    read = lambda text: emulation.memory_limit({emulation.MEMORY_VARIABLE: text})  # noqa: E731 - two uses
    assert (read("2GiB"), read("1.5 MiB"), read("")) == (2 * GIB, 3 * 2**19, None)
    for wrong in ("2", "2GB", "0GiB", "-1GiB", "x" * 500, "9" * 50 + "GiB"):
        with pytest.raises(ConfigError, match="SMP_EMULATE_CUDA_MEMORY"):
            read(wrong)
    with pytest.raises(ConfigError, match="SMP_EMULATE_CUDA_REPORT"):
        emulation.wants_report({emulation.REPORT_VARIABLE: "yes"})


@pytest.fixture
def small_devices(monkeypatch):
    """Two devices with 64 MiB each, where they are emulated."""
    monkeypatch.setenv("SMP_LOCAL_SIZE", "2")
    monkeypatch.setenv(emulation.MEMORY_VARIABLE, "64MiB")
    for name in ("SMP_LOCAL_RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", OWNER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices._current, "index", 0)


@pytest.fixture
def plain(small_devices):
    """The model of the plain emulation."""
    with installing.emulated():
        yield installing._models[0].model
    assert OWNER_VARIABLE not in os.environ


@pytest.fixture(params=["checked", "plain"])
def limited(request, small_devices):
    """A model of devices with 64 MiB each, of the checked devices and of the plain emulation."""
    if request.param == "plain":
        yield request.getfixturevalue("plain")
        return
    with checked.emulated(devices=2) as found:
        yield found.model
    assert OWNER_VARIABLE not in os.environ


def _train(model, optimizer, batch):
    optimizer.zero_grad()
    model(torch.ones(batch, 256, device="cuda")).square().mean().backward()
    optimizer.step()


def test_training_goes_on_after_memory_was_out(limited):
    torch.cuda.set_device(1)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        _train(model, optimizer, 8)
    gc.collect()
    before = torch.cuda.memory_allocated()
    assert before >= 4 * sum(parameter.nbytes for parameter in model.parameters())
    with pytest.raises(torch.cuda.OutOfMemoryError, match="GPU 1 has a total capacity of 64.00 MiB"):
        _train(model, optimizer, 2**15)
    gc.collect()
    optimizer.zero_grad()
    # The gradients of the second step are gone, the memory of the failed one is free.
    assert torch.cuda.memory_allocated() <= before
    for _ in range(2):
        _train(model, optimizer, 8)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert any(sentence.startswith("out of memory: cuda:1") for sentence in limited.findings())


def test_more_than_any_device_has_is_refused_at_once(limited):
    for make in (torch.empty, torch.zeros):
        with pytest.raises(torch.OutOfMemoryError, match="200.00 GiB"):
            make(200 * GIB, dtype=torch.uint8, device="cuda")


def test_torch_cuda_reports_the_model(limited):
    block = torch.zeros(5 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == 5 * MIB
    assert torch.cuda.memory_reserved() == torch.cuda.memory_reserved(0) == 20 * MIB
    assert torch.cuda.mem_get_info() == (44 * MIB, 64 * MIB)
    assert torch.cuda.get_device_properties(0).total_memory == 64 * MIB
    assert torch.cuda.device_memory_used() == torch.cuda.memory_cached() == 20 * MIB
    del block
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.max_memory_allocated() == 5 * MIB
    torch.cuda.empty_cache()
    assert (torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()) == (0, 20 * MIB)
    torch.cuda.reset_peak_memory_stats()
    assert (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) == (0, 0)
    stats = torch.cuda.memory_stats()
    assert (stats["allocated_bytes.all.allocated"], stats["num_ooms"]) == (5 * MIB, 0)
    torch.cuda.set_per_process_memory_fraction(0.5)
    with pytest.raises(torch.OutOfMemoryError, match="32.00 MiB allowed"):
        torch.zeros(40 * MIB, dtype=torch.uint8, device="cuda")


def test_memory_of_other_threads_counts(limited):
    kept = []
    make = lambda: kept.append(torch.zeros(5 * MIB, dtype=torch.uint8, device="cuda"))  # noqa: E731 - a thread's work
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert torch.cuda.memory_allocated(0) == 5 * MIB


def test_torch_accelerator_reports_the_model(plain):
    block = torch.zeros(5 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.accelerator.memory_allocated() == block.nbytes
    assert torch.accelerator.max_memory_reserved() == 20 * MIB
    if hasattr(torch.accelerator, "get_memory_info"):
        assert torch.accelerator.get_memory_info() == (44 * MIB, 64 * MIB)


def test_a_storage_that_is_emptied_in_place_is_free(limited):
    x = torch.zeros(5 * MIB, dtype=torch.uint8, device="cuda")
    x.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == 0
    x.untyped_storage().resize_(6 * MIB)
    assert torch.cuda.memory_allocated() == 6 * MIB
    del x
    assert torch.cuda.memory_allocated() == 0


def test_memory_of_recorded_streams_is_held_back():
    with checked.emulated() as emulated:
        side = torch.cuda.Stream()
        x = torch.zeros(5 * MIB, dtype=torch.uint8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        x.record_stream(side)
        del x
        found = emulated.model.allocator(0).statistics()
        assert (found.allocated.now, found.active.now) == (5 * MIB, 10 * MIB)
        torch.cuda.current_stream().wait_stream(side)
        torch.zeros(1, device="cuda")
        assert emulated.model.allocator(0).statistics().active.now <= 5 * MIB + 512
        del y


# -- planted faults ------------------------------------------------------------------------------------------------


def _contexts(model):
    return [sentence for sentence in model.findings() if "second CUDA context" in sentence]


def test_a_context_of_another_thread_is_found(limited):
    torch.cuda.set_device(1)
    torch.zeros(1, device="cuda")
    assert not _contexts(limited)
    thread = threading.Thread(target=lambda: torch.zeros(1, device="cuda"), name="loading")
    thread.start()
    thread.join()
    (found,) = _contexts(limited)
    for part in ("uses cuda:0", "its rank's device is cuda:1", "test_gpu_model.py", "the thread loading"):
        assert part in found


def test_a_context_before_the_device_is_chosen_is_found(limited, monkeypatch):
    monkeypatch.setenv("SMP_LOCAL_RANK", "1")
    torch.cuda.synchronize()
    assert "torch.cuda.synchronize" in _contexts(limited)[0]


@pytest.mark.parametrize(("device", "words"), [(0, "its rank's device is cuda:1"), (1, "which started it")])
def test_a_context_of_another_process_is_found(device, words):
    environ = {"SMP_LOCAL_RANK": "1"}
    contexts = Contexts(2, environ)
    contexts.choose(1)
    reader, writer = os.pipe()

    def use():
        contexts.heard = lambda sentence: os.write(writer, sentence.encode())
        contexts.use(device, "a tensor")

    process = multiprocessing.get_context("fork").Process(target=use)
    process.start()
    process.join(30)
    os.close(writer)
    with os.fdopen(reader) as file:
        heard = file.read()
    assert f"process {process.pid} uses cuda:{device}" in heard
    assert words in heard
    assert not contexts.findings()
    other = Contexts(2, dict(environ))  # of a process that was not forked
    other._pid = 0
    other.found = dict(contexts.found)
    assert "which started it" in other.findings()[0]


def _steps(make_batch, count=8):
    weight = nn.Parameter(torch.ones(1024, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(count):
        make_batch()
        weight.grad = torch.ones_like(weight)
        optimizer.step()


def _growth(model):
    return [sentence for sentence in model.findings() if sentence.startswith("growing pools")]


def test_a_pool_that_grows_is_found(limited):
    def new_stream():
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")

    for allocator in limited.allocators:
        allocator.limit = GIB
    _steps(new_stream)
    (found,) = _growth(limited)
    assert "of cuda:0" in found
    assert limited.steps[-1].reserved - limited.steps[2].reserved == 5 * 20 * MIB
    assert limited.steps[-1].allocated == limited.steps[2].allocated


def test_a_pool_of_one_side_stream_does_not_grow(limited):
    side = torch.cuda.Stream()

    def one_stream():
        with torch.cuda.stream(side):
            torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")

    _steps(one_stream)
    assert not _growth(limited)


def test_memory_that_is_kept_is_no_growing_pool(limited):
    for allocator in limited.allocators:
        allocator.limit = GIB
    kept = []
    _steps(lambda: kept.append(torch.empty(12 * MIB, dtype=torch.uint8, device="cuda")))
    assert limited.steps[-1].reserved - limited.steps[2].reserved == 5 * 12 * MIB
    assert not _growth(limited)


def test_streams_beyond_thirty_two_are_the_first_ones_again():
    assert [stream_of_pool(number) for number in (-1, 0, 1, 32, 33, 64)] == [0, 0, 1, 32, 1, 32]


def _bound(model):
    return [sentence for sentence in model.findings() if sentence.startswith("bound by")]


def test_a_step_that_waits_for_the_host_is_found(limited):
    small = torch.ones(64, device="cuda")

    def many_small():
        for _ in range(50):
            small.mul_(1.0)

    _steps(many_small, count=4)
    (found,) = _bound(limited)
    assert found.startswith("bound by the host: a step launches 5")
    assert limited.steps[-1].work.bound == "host"
    assert limited.steps[-1].work.launches in range(52, 56)


def test_a_step_that_waits_for_the_device_is_not():
    model = GpuModel(1)
    try:
        big, product, rows = (torch.empty(size, device="meta") for size in ((4096, 8192), (4096, 4096), (8,)))
        for _ in range(4):
            model.count_work(aten.mm.default, (big, big.t()), {}, [big, big.t()], [product])
            model.end_step()
        assert not model.findings()
        work = model.steps[0].work
        assert (work.launches, work.flops, work.bound) == (1, 2 * 4096**2 * 8192, "device")
        assert work.device_seconds == pytest.approx(work.flops / 800e12 / 0.7)
        for _ in range(20):
            model.count_work(aten.neg.default, (rows,), {}, [rows], [rows])
        assert model._work.bound == "host"
        model.count_work(aten.mm.default, (big, big.t()), {}, [big, big.t()], [product])
        assert model._work.bound == "host in eager mode"
    finally:
        model.close()


# -- what is counted ---------------------------------------------------------------------------------------------------


def test_work_of_operations():
    x, rows = torch.zeros(1000, 8), torch.zeros(2, 8)
    work = StepWork()
    work.add(aten.add_.Tensor, (x, x), {}, [x, x], [])
    assert (work.moved, work.device_seconds) == (3 * x.nbytes, pytest.approx(3 * x.nbytes / 3e12 / 0.7))
    work = StepWork()
    work.add(aten.embedding.default, (x, rows), {}, [x, rows], [rows])
    assert work.moved == 2 * rows.nbytes  # not all of the table
    work.add(aten.empty.memory_format, ([2],), {}, [], [rows])
    work.add(aten._unsafe_view.default, (x, [8, 1000]), {}, [x], [x.view(8, 1000)])
    assert work.launches == 1
    image, weight = torch.zeros(1, 3, 8, 8), torch.zeros(4, 3, 3, 3)
    out = torch.nn.functional.conv2d(image, weight)
    arguments = (out, image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
    work = StepWork()
    work.add(aten.convolution_backward.default, arguments, {}, [out, image, weight], [weight])
    assert work.flops == 2 * out.numel() * 27


def test_operations_on_lists_take_few_kernels():
    tensors = [torch.zeros(2) for _ in range(111)]
    assert count_launches(aten._foreach_add_.Scalar, (tensors, 1), tensors) == 2
    assert count_launches(aten._foreach_add_.List, (tensors, tensors), tensors) == 2
    assert count_launches(aten._foreach_addcdiv_.Scalar, (tensors, tensors, tensors), tensors) == 3
    large = [torch.zeros(1, device="meta").expand(2**26)]
    assert count_launches(aten._foreach_add_.Scalar, (large, 1), large) == 4
    assert count_launches(aten.add.Tensor, (tensors[0], tensors[0]), tensors[:2]) == 1


def _steps_of_a_job():
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @smp.step
    def step(model, x):
        loss = model(x).float().square().mean()
        model.backward(loss)
        return loss

    def update(batch):
        optimizer.zero_grad()
        loss = step(model, torch.ones(batch, 256, device="cuda")).reduce_mean().item()
        optimizer.step()
        return loss

    losses = [update(16), update(16)]
    gc.collect()
    before = torch.cuda.memory_allocated()
    try:
        update(2**16)
        raised = None
    except torch.OutOfMemoryError as error:
        raised = str(error)
    gc.collect()
    left = torch.cuda.memory_allocated() - before
    return raised, left, [*losses, update(16), update(16)]


@pytest.mark.parametrize("config", [{"bf16": True}, {"microbatches": 2, "offload_activations": True}])
def test_a_job_goes_on_after_a_batch_that_did_not_fit(config, monkeypatch):
    monkeypatch.setenv(emulation.MEMORY_VARIABLE, "64MiB")
    raised, left, losses = on_devices(0, config, _steps_of_a_job)
    assert "CUDA out of memory. Tried to allocate" in raised
    assert left < MIB
    assert losses == sorted(losses, reverse=True)


SCRIPT = """
from smp_emulation.installing import install
install()
import torch
torch.zeros(2**20, device="cuda")
torch.cuda.set_device(1)
try:
    torch.zeros(2**25, device="cuda")
except torch.OutOfMemoryError:
    pass
"""


def test_a_process_prints_its_report_when_it_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    variables = {
        "SMP_LOCAL_SIZE": "2",
        "SMP_LOCAL_RANK": "1",
        "SMP_RANK": "1",
        "SMP_EMULATE_CUDA_REPORT": "1",
        "SMP_EMULATE_CUDA_MEMORY": "64MiB",
    }
    environ = {**os.environ, **variables}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environ, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("[smp] emulated GPU, rank 1: ")]
    assert any("a second CUDA context" in line and "script.py:5" in line for line in lines)
    assert any("out of memory: cuda:1" in line for line in lines)


def test_the_report_has_a_line_for_each_step(limited):
    _steps(lambda: None, count=3)
    heading, *lines = limited.report().splitlines()
    assert heading.split()[:2] == ["step", "launches"]
    assert [line.split()[0] for line in lines[:3]] == ["1", "2", "3"]
