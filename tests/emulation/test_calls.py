"""The idioms of GPU scripts on CPU tensors."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.usefixtures("cuda")

CPU = torch.device("cpu")


def test_a_script_finds_its_device(monkeypatch):
    assert torch.cuda.is_available()
    assert torch.backends.cuda.is_built()
    assert torch.cuda.device_count() == 2  # SMP_LOCAL_SIZE
    monkeypatch.setenv("SMP_EMULATE_CUDA_DEVICES", "1")  # that both ranks share
    assert torch.cuda.device_count() == 1
    with pytest.raises(RuntimeError, match="SMP_EMULATE_CUDA_DEVICES"):
        torch.cuda.set_device(1)
    monkeypatch.delenv("SMP_EMULATE_CUDA_DEVICES")
    torch.cuda.set_device(1)
    try:
        assert torch.cuda.current_device() == 1
        with torch.cuda.device(0):
            assert torch.cuda.current_device() == 0
        assert torch.cuda.current_device() == 1
        found = []
        thread = threading.Thread(target=lambda: found.append((torch.cuda.is_available(), torch.cuda.current_device())))
        thread.start()
        thread.join()
        assert found == [(True, 0)]  # CUDA gives every thread the first device
    finally:
        torch.cuda.set_device("cuda:0")
    assert torch.cuda.get_device_capability() == (8, 0)
    assert torch.cuda.get_device_properties("cuda:1").total_memory > 2**30
    assert "emulated" in torch.cuda.get_device_name(0)
    assert int(torch.version.cuda.split(".")[0]) >= 11
    assert torch.cuda.is_bf16_supported()


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.cuda.set_device(2),
        lambda: torch.zeros(1, device="cuda:2"),
        lambda: torch.zeros(1).to(torch.device("cuda", 2)),
        lambda: torch.zeros(1).cuda(5),
        lambda: nn.Linear(1, 1).to("cuda:2"),
        lambda: torch.cuda.memory_allocated(3),
    ],
)
def test_a_device_that_is_not_there(use):
    with pytest.raises(
        RuntimeError, match=r"invalid device ordinal: device \d .* sees 2 emulated CUDA devices .*local rank"
    ):
        use()


def test_a_bare_number_is_a_device():
    first = torch.device(0)
    assert (type(first), first, torch.device(1)) == (torch.device, torch.device("cuda", 0), torch.device("cuda:1"))
    assert pickle.loads(pickle.dumps(first)) == copy.deepcopy(first) == first
    assert torch.device(type="cuda", index=1) == torch.device("cuda", 1)
    assert torch.device(CPU) == torch.device("cpu") == CPU
    with torch.device(0):
        assert torch.zeros(1).device == CPU
    for wrong in ((-1,), ("nowhere",), (None,), (), (True, False, True)):
        with pytest.raises((RuntimeError, TypeError)):
            torch.device(*wrong)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 1), 0, 1, -1])
def test_tensors_and_modules_are_made_and_moved(device):
    made = [
        torch.empty(2, device=device),
        torch.zeros(2, dtype=torch.int64, device=device),
        torch.tensor([1.0, 2.0], device=device),
        torch.arange(3, device=device),
        torch.randn(2, 3, device=device),
        torch.randint(0, 5, (3,), device=device),
        torch.ones_like(torch.zeros(2), device=device),
        torch.zeros(2).new_ones(3, device=device),
        torch.as_tensor([1, 2], device=device),
        torch.tril_indices(2, 2, device=device),
        torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (2,), device=device, check_invariants=True),
        torch.fft.fftfreq(4, device=device),
        torch.zeros(2, pin_memory=True),
    ]
    assert {tensor.device for tensor in made} == {CPU}
    x = torch.ones(2)
    assert x.to(device) is x
    assert x.to(device, torch.float16).dtype is torch.float16
    assert x.to(device=device, dtype=torch.float64, non_blocking=True).dtype is torch.float64
    module = nn.LSTM(2, 2, device=device)
    weight = module.weight_hh_l0
    if device != -1:
        assert x.cuda(device, non_blocking=True) is x
        assert module.cuda(device).to(device).weight_hh_l0 is weight
    assert module.to_empty(device=device).weight_hh_l0.device == CPU
    if not isinstance(device, int):
        with torch.device(device):
            assert nn.Linear(2, 2).weight.device == CPU
        torch.set_default_device(device)
        assert torch.zeros(1).device == CPU
        torch.set_default_device(None)


def test_what_tensors_say_to_a_script_and_to_pytorch():
    x = torch.ones(2, 3)
    # PyTorch's own code, and its caller's devices, are not misled.
    assert x.device == CPU
    assert nn.utils.rnn.pack_padded_sequence(x[None], [2], batch_first=True).is_cuda is False
    assert x.is_cuda
    assert x.get_device() == 0
    assert x.half().type() == "torch.cuda.HalfTensor"
    assert x.type(torch.cuda.HalfTensor).dtype is torch.float16
    assert x.type("torch.cuda.LongTensor").dtype is torch.int64
    assert isinstance(x, torch.cuda.FloatTensor)
    assert not isinstance(x, torch.cuda.HalfTensor)
    assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
    assert torch.cuda.FloatTensor(2, 3).shape == (2, 3)
    assert not torch.empty(1, device="meta").is_cuda


def test_copies_in_main_memory_are_copies():
    best = {name: tensor.cpu() for name, tensor in nn.Linear(2, 2).state_dict().items()}
    x = torch.ones(3)
    kept, also = x.cpu(), x.to("cpu")
    assert x.to(x.device) is x
    x.zero_()
    assert kept.tolist() == also.tolist() == [1.0, 1.0, 1.0]
    model = nn.Linear(2, 2)
    weight, address = model.weight, model.weight.data_ptr()
    assert model.cpu().cuda().weight is weight
    assert weight.data_ptr() == address  # PyTorch's own code moves nothing
    model.load_state_dict(best)


def test_streams_and_events():
    first, second = torch.cuda.Stream(priority=-1), torch.cuda.Stream("cuda:0")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    with torch.cuda.stream(first):
        assert torch.cuda.current_stream() == first
        start.record()
        x = torch.ones(100, device="cuda").sum()
        with second:
            assert torch.cuda.current_stream() == second
        assert torch.cuda.current_stream() == first
        end.record()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    second.wait_stream(first)
    torch.cuda.current_stream().wait_event(first.record_event())
    x.record_stream(second)
    first.synchronize()
    torch.cuda.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    with pytest.raises(ValueError, match="enable_timing"):
        start.elapsed_time(torch.cuda.Event())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "make",
    [lambda: torch.autocast("cuda"), lambda: torch.amp.autocast(device_type="cuda"), lambda: torch.cuda.amp.autocast()],
)
def test_mixed_precision_with_a_scaler(make):
    model = nn.Linear(4, 1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    assert not torch.is_autocast_enabled()
    with make():
        assert torch.is_autocast_enabled()
        assert torch.get_autocast_gpu_dtype() is torch.float16
        out = model(torch.ones(2, 4, device="cuda"))
        assert out.dtype is torch.float16
    before = model.weight.clone()
    scaler.scale(out.float().sum()).backward()
    scaler.unscale_(optimizer)
    assert torch.allclose(model.weight.grad, torch.full_like(model.weight, 2.0))
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight, before)
    assert scaler.get_scale() == 8.0
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert model(torch.ones(2, 4)).dtype is torch.bfloat16
    with torch.autocast("cuda", enabled=False):
        assert model(torch.ones(2, 4)).dtype is torch.float32
    with pytest.warns(FutureWarning):
        assert torch.cuda.amp.GradScaler().is_enabled()


class _Double(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        assert not torch.is_autocast_enabled()
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, gradient):
        return gradient * 2


def test_own_functions_under_autocast():
    # Decorated where the class was made, before the emulation: as in a module that a script imports is tested by the job.
    forward = torch.amp.custom_fwd(lambda ctx, x: x, device_type="cuda", cast_inputs=torch.float32)
    with torch.autocast("cuda"):
        assert forward(type("Context", (), {})(), torch.ones(1).half()).dtype is torch.float32


def test_random_numbers():
    torch.cuda.manual_seed_all(3)
    first = torch.rand(3, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), second)
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
    generator = torch.Generator(device="cuda").manual_seed(5)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.equal(
        torch.rand(2, device="cuda", generator=generator), torch.rand(2, generator=torch.Generator().manual_seed(5))
    )
    torch.cuda.default_generators[0].manual_seed(3)
    assert torch.equal(torch.rand(3), first)
    x = torch.ones(64, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x * 1, 0.5), x, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())  # the same numbers again


def test_memory_is_that_of_the_process():
    # Small ones: the allocator keeps what is freed of them.
    parts = [torch.ones(2**16, dtype=torch.uint8) for _ in range(2048)]
    last = torch.ones(2**16, dtype=torch.uint8)
    used = torch.cuda.memory_allocated()
    parts.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < used - 64 * 2**20
    del last
    before = torch.cuda.memory_allocated()
    block = torch.ones(64 * 2**20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before > 32 * 2**20
    assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() - 2**20
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] > block.nbytes
    assert torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["peak"] > block.nbytes
    assert "MiB" in torch.cuda.memory_summary()
    torch.cuda.set_per_process_memory_fraction(0.5)
    assert torch.cuda.get_per_process_memory_fraction() == 0.5


@pytest.mark.parametrize("workers", [0, 1])
def test_pinned_loaders(workers):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = DataLoader(TensorDataset(torch.arange(6)), 3, pin_memory=True, num_workers=workers)
        found = [batch.to("cuda", non_blocking=True).tolist() for (batch,) in loader]
    assert found == [[0, 1, 2], [3, 4, 5]]
    assert torch.ones(2).pin_memory().tolist() == [1, 1]


PLACES = [None, "cuda", "cuda:1", torch.device("cuda"), {"cuda:1": "cuda:0"}, lambda storage, _: storage.cuda(1)]


@pytest.mark.parametrize("to", PLACES)
def test_files_that_a_gpu_wrote(to):
    file = io.BytesIO()
    torch.save({"w": torch.arange(3)}, file)
    file.seek(0)
    assert torch.load(file, map_location=to)["w"].tolist() == [0, 1, 2]
    # A file says where its tensors lay.
    storage = torch.ones(1).untyped_storage()
    assert torch.serialization.default_restore_location(storage, "cuda:1") is storage


def test_older_idioms():
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    assert torch.zeros(1).dtype is torch.float32
    torch.set_default_tensor_type(torch.FloatTensor)
    torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.version() > 8000
    torch.cuda.nvtx.range_push("step")
    torch.cuda.nvtx.range_pop()
    torch.cuda.cudart().cudaProfilerStart()
    with torch.cuda.profiler.profile(), torch.cuda.nvtx.range("step"):
        pass
    model = nn.DataParallel(nn.Linear(2, 2).cuda(), device_ids=[0, 1])
    assert model(torch.ones(3, 2).cuda()).shape == (3, 2)
    assert [part.tolist() for part in torch.cuda.comm.scatter(torch.arange(4), [0, 1])] == [[0, 1], [2, 3]]
    assert torch.cuda.comm.reduce_add([torch.ones(2), torch.ones(2)]).tolist() == [2, 2]
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.compiler is not None


@pytest.mark.parametrize("activities", [None, ["CPU", "CUDA"], ["CUDA"]])
def test_the_profiler_records_the_cpu_and_no_events_of_a_device(activities, capfd):
    kinds = activities and [getattr(torch.profiler.ProfilerActivity, name) for name in activities]
    with torch.profiler.profile(activities=kinds) as profile:
        torch.ones(3, device="cuda") + 1
    assert "aten::add" in {event.key for event in profile.key_averages()}
    assert profile.key_averages().table(sort_by="cuda_time_total", row_limit=2)
    # PyTorch would try one for each operation; each error comes with a stack, which takes long to find.
    assert "Failed to record CUDA event" not in capfd.readouterr().err


def test_process_groups(tmp_path, monkeypatch, caplog):
    import torch.distributed as dist

    assert dist.is_nccl_available()
    for rank in ("1", "0"):  # what the environment says; the first of them tells of it
        monkeypatch.setenv("SMP_RANK", rank)
        store = dist.FileStore(str(tmp_path / rank), 1)
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        dist.init_process_group(
            "nccl", store=store, rank=0, world_size=1, pg_options=options, device_id=torch.device("cuda", 0)
        )
        try:
            assert dist.get_backend() == "gloo"
            total = torch.ones(2, device="cuda")
            dist.all_reduce(total, group=dist.new_group([0], backend="nccl"))
            dist.barrier(device_ids=[0])
            objects = ["a"]
            dist.broadcast_object_list(objects, src=0, device=torch.device("cuda", 0))
            model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2).cuda(), device_ids=[0], output_device=0)
            model(total[None]).sum().backward()
            assert dist.init_device_mesh("cuda", (1,)).device_type == "cpu"
        finally:
            dist.destroy_process_group()
    assert [record.getMessage() for record in caplog.records if record.name == "smp_emulation"] == [
        "init_process_group('nccl'): no GPU here, so the collectives of all ranks go over gloo (SMP_EMULATE_CUDA=1)"
    ]


def _in_a_child(queue):
    queue.put((torch.cuda.is_available(), torch.zeros(1, device="cuda").device.type))


def test_children_that_are_forked():
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_a_child, args=(queue,))
    child.start()
    assert queue.get(timeout=30) == (True, "cpu")
    child.join()


def test_what_is_created_on_the_meta_device_stays_there():
    program = """
import torch
from smp_emulation.installing import emulated

with emulated(), torch.device("meta"):
    assert torch.ones(1).is_meta and torch.nn.Linear(2, 2).weight.is_meta
with torch.device("meta"):
    assert torch.ones(1).is_meta
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.full
def test_compiled_functions():
    @torch.compile(backend="aot_eager")
    def step(x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return nn.functional.linear(x.to("cuda"), torch.ones(2, 4, device="cuda"))

    assert step(torch.ones(3, 4)).dtype is torch.bfloat16


def test_classes_of_tensors_are_asked_about_the_functions_that_scripts_see():
    answers = {torch.zeros_like: "zeros", torch.empty_like: "empty"}

    class Answers(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func in answers:
                return answers[func], (kwargs or {}).get("device")
            return super().__torch_function__(func, types, args, kwargs or {})

    value = torch.ones(2).as_subclass(Answers)
    assert torch.zeros_like(value) == ("zeros", None)
    assert torch.empty_like(value, device="cuda:0") == ("empty", CPU)
    ones = torch.ones_like(value, device="cuda:1")
    assert isinstance(ones, Answers)
    assert ones.device == CPU
