"""Emulated devices that check the order of work: late, in many orders, with PyTorch's results, and with the rules of NCCL."""

from __future__ import annotations

import io
import os
import threading

import pytest
import torch
import torch.nn.functional as F
from support import matrix
from torch import nn

from smp_config.machine import emulation
from smp_emulation.checked import emulated, install
from smp_emulation.checked.communicators import Asked
from smp_emulation.checked.streams.execution import Executor


def _order_of(seed, monkeypatch):
    done = []
    step = Executor._step
    monkeypatch.setattr(Executor, "_step", lambda self, lane: (done.append(lane.name[:8]), step(self, lane))[1])
    with emulated(seed):
        streams = [torch.cuda.Stream() for _ in range(3)]
        for stream in streams:
            with torch.cuda.stream(stream):
                x = torch.ones(2, device="cuda")
                for _ in range(3):
                    x = x + 1
        torch.cuda.synchronize()
    monkeypatch.undo()
    return tuple(done)


def test_each_seed_is_an_order_of_its_own(monkeypatch):
    orders = [_order_of(seed, monkeypatch) for seed in (0, 1, 2, 3, 0)]
    assert len(set(orders)) == 4
    assert orders[0] == orders[4]


def test_a_request_over_many_tensors_is_whole_after_its_way():
    short = Asked("all_reduce over 3 tensors", "host/cuda:0", "train.py:12 in step")
    assert Asked.unpacked(short.packed()) == short
    long = Asked("all_reduce over " + ", ".join(["[1024, 1024] float32"] * 99), short.device, short.line)
    found = Asked.unpacked(long.packed())
    assert (found.device, found.line) == (long.device, long.line)
    assert long.what.startswith(found.what)
    assert len(found.what) > 400


def test_work_is_done_when_the_host_waits():
    with emulated() as emulation:
        x, host = torch.ones(4, device="cuda"), torch.zeros(4, pin_memory=True)
        host.copy_(x * 3, non_blocking=True)
        place = emulation.devices.memory.place_of(x)
        assert place.block.elements.view(torch.float32).isnan().all()
        torch.cuda.synchronize()
        assert host.tolist() == [3.0] * 4
        assert [kind for kind, _ in emulation.waits] == ["torch.cuda.synchronize"]


def _train(device):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.Embedding(11, 16), nn.Dropout(0.1), layer, nn.BatchNorm1d(5), nn.Linear(16, 11)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(1)).to(device)
    torch.manual_seed(5)
    losses = []
    for _ in range(4):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def test_training_is_that_on_the_cpu_with_dropout():
    losses, state = _train("cpu")
    for seed in range(matrix.examples(1, 2)):
        with emulated(seed):
            found, weights = _train("cuda")
        assert found == losses
        for name, value in state.items():
            assert torch.equal(weights[name], value), name


def test_tensors_say_where_they_are():
    with emulated(devices=2):
        x = torch.ones(2, device="cuda:1")
        assert (x.device, x.is_cuda, x.is_cpu, x.get_device()) == (torch.device("cuda", 1), True, False, 1)
        assert x[0].device == (x * 2).device == torch.empty_like(x).device == nn.Parameter(x).device == x.device
        assert x.to(x.device) is x
        assert x.cpu().is_cpu
        assert torch.empty_like(x, device="cpu").is_cpu
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(2, device="cuda:0")
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(2)
        with pytest.raises(TypeError, match="cpu"):
            x.numpy()
        with pytest.raises(RuntimeError, match="invalid device"):
            torch.cuda.set_device(2)
        assert (x + torch.tensor(1.0)).tolist() == [2.0, 2.0]
        assert x.nonzero().tolist() == [[0], [1]]
    assert not torch.cuda.is_available()


def test_gradients_cross_devices():
    with emulated():
        x = torch.ones(3, requires_grad=True)
        (x.to("cuda") * 2).sum().backward()
        assert x.grad.is_cpu
        assert x.grad.tolist() == [2.0] * 3


def test_what_is_saved_is_what_is_on_the_device():
    with emulated():
        file = io.BytesIO()
        torch.save({"x": torch.arange(4, device="cuda") * 2}, file)
    file.seek(0)
    assert torch.load(file, map_location="cpu")["x"].tolist() == [0, 2, 4, 6]


def test_one_at_a_time_and_only_without_a_gpu():
    with emulated(), pytest.raises(RuntimeError, match="installed already"):
        install()


def test_what_the_environment_asks_for():
    asked = {"checked": 0, "checked:7": 7, "1": None, "0": None, "": None}
    for value, seed in asked.items():
        environ = {emulation.VARIABLE: value}
        assert emulation.seed_of_checks(environ) == seed
        assert emulation.is_asked_for(environ) == (value not in ("0", ""))
    with pytest.raises(ValueError, match="a whole number"):
        emulation.seed_of_checks({emulation.VARIABLE: "checked:x"})


def test_the_environment_sets_the_number_of_devices(monkeypatch):
    monkeypatch.setenv("SMP_LOCAL_SIZE", "4")
    for value, count in (("", 4), ("1", 1), ("2", 2)):
        monkeypatch.setenv(emulation.DEVICES_VARIABLE, value)
        with emulated(devices=None):
            assert torch.cuda.device_count() == count
    for wrong in ("0", "one", "-1", "2000"):
        with pytest.raises(ValueError, match="SMP_EMULATE_CUDA_DEVICES is .*the number of emulated devices"):
            emulation.device_count({emulation.DEVICES_VARIABLE: wrong})


def _alike(kind):
    """Breaks one of NCCL's rules."""
    import torch.distributed as dist

    from smp_emulation.checked import emulated

    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    prefix = dist.PrefixStore(f"rules-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    with emulated(devices=2):
        torch.cuda.set_device(0 if kind == "one device" else rank)
        dist.init_process_group("nccl", store=prefix, rank=rank, world_size=2)
        x, small = torch.ones(4, device="cuda"), torch.ones(3, device="cuda")
        if kind == "host memory":
            dist.all_reduce(torch.ones(2))
        elif kind == "order":
            for each in (x, small) if rank else (small, x):
                dist.all_reduce(each)
        else:
            dist.all_reduce(x)
        return x.tolist()


def _over_gloo():
    """Tries gloo's collectives on one device for two ranks, and its rules."""
    import torch.distributed as dist

    from smp_emulation.checked import emulated
    from smp_emulation.errors import CudaCallError

    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    prefix = dist.PrefixStore(f"gloo-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    with emulated(seed=5, devices=1):
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=2)
        x = torch.arange(4.0, device="cuda") + rank
        works = [dist.all_reduce(part, async_op=True) for part in (x[:2], x[2:])]
        host = torch.ones(2)
        dist.all_reduce(host)  # between them, for another device
        for work in works:
            work.wait()
        whole = torch.empty(8, device="cuda")
        dist.all_gather_into_tensor(whole, x * (1 + rank))
        refused = []
        for call in (dist.send, dist.recv):
            try:
                call(x, 1 - rank)
            except CudaCallError as error:
                refused.append(str(error))
        found = x.tolist(), whole.tolist(), host.tolist(), refused
        dist.destroy_process_group()
        return found


def test_gloo_takes_tensors_of_a_device_that_ranks_share(ranks):
    for x, whole, host, refused in ranks(_over_gloo, 2, init=False):
        assert x == [1.0, 3.0, 5.0, 7.0]
        assert whole == [*x, *(2 * value for value in x)]
        assert host == [2.0, 2.0]
        assert len(refused) == 2
        assert all("gloo sends no tensors of a device" in each for each in refused)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "says"),
    [("order", "ask for different"), ("one device", "Duplicate GPU"), ("host memory", "No backend|host memory")],
)
def test_rules_of_nccl(ranks, kind, says):
    from support.ranks.rank_pool import RankFailed

    with pytest.raises(RankFailed, match=says):
        ranks(_alike, 2, kind, init=False)


def test_a_gradient_that_its_caller_keeps_is_copied_on_the_device():
    """PyTorch takes other gradients as they are. It makes the copy with the options of the parameter."""
    with emulated():
        weight, gradient = nn.Parameter(torch.ones(3, device="cuda")), torch.ones(3, device="cuda")
        for _ in range(2):
            weight.backward(gradient)
        assert weight.grad.is_cuda
        assert weight.grad.tolist() == [2.0] * 3
        assert not gradient.new_empty(2, device="cpu").is_cuda


def test_backward_passes_of_the_engine_itself_run_on_the_thread_for_them():
    """A module that was imported after the devices were installed takes the engine's function from there."""
    threads = []
    with emulated():
        weight = torch.ones(3, device="cuda", requires_grad=True)
        weight.register_hook(lambda gradient: threads.append(threading.current_thread().name))
        run = torch.autograd.Variable._execution_engine.run_backward
        run(
            (weight.sum(),),
            (torch.ones((), device="cuda"),),
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    assert threads == ["emulated-backward"]


def test_what_modules_have_imported_by_name_is_replaced_and_put_back():
    from smp_runtime.tensors import lazy_tensor, weight_gradients

    def read():
        return [weight_gradients.run_backward, lazy_tensor.make_without_elements]

    before = read()
    with emulated():
        assert not any(now is own for now, own in zip(read(), before, strict=True))
    assert all(now is own for now, own in zip(read(), before, strict=True))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind, recwarn):
    torch.manual_seed(0)
    layer, x = kind(4, 5, num_layers=2, batch_first=True, bidirectional=True), torch.randn(3, 6, 4)
    expected = layer(x)[0]
    gradients = torch.autograd.grad(expected.sum(), layer.parameters())
    had_onednn = torch.backends.mkldnn.enabled
    with emulated():
        layer.to("cuda")
        found = layer(x.to("cuda"))[0]
        found.sum().backward()
        assert torch.allclose(found.detach().cpu(), expected, atol=1e-6)
        for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
            assert torch.allclose(parameter.grad.cpu(), gradient, atol=1e-5)
    assert torch.backends.mkldnn.enabled == had_onednn
    assert not [each for each in recwarn if "cuDNN" in str(each.message)]
