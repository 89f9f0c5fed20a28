"""Which GPU each rank takes, what goes over which backend, and what of a pipeline's model lies on a stage's device."""

from __future__ import annotations

import os
import types

import pytest
import torch
from support.training.pipeline_training import summing_step
from torch import nn

from smp_config import ConfigError, ModelParallelParameters
from smp_config.machine.collective_backends import TRAITS, BackendTraits, traits_of_group
from smp_config.machine.shared_gpu import read_shared_gpu
from smp_runtime.comm import devices
from smp_runtime.comm.devices import (
    assign_gpus,
    channel_backend,
    choose_backend,
    choose_host_collectives,
    let_nccl_share,
    nccl_sharing_variables,
    nccl_version,
    sharing_ranks,
    sharing_warning,
    visible_gpus,
)
from smp_runtime.errors import SMPUserError
from smp_runtime.job.backend_implementations import implementation_of
from smp_runtime.model.stages import _wholly_on
from smp_runtime.pipeline.partition import decision as deciding

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
EIGHT = [f"GPU-{number}" for number in range(8)]
OTHER_EIGHT = [f"GPU-x{number}" for number in range(8)]


def settings(backend="auto", **more):
    return ModelParallelParameters.from_mp_parameters({"ddp": True, "ddp_dist_backend": backend, **more})


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        ([[]] * 3, [None, None, None]),
        ([EIGHT] * 8, list(range(8))),
        ([EIGHT] * 4 + [OTHER_EIGHT] * 4, [0, 1, 2, 3, 0, 1, 2, 3]),  # two machines
        ([EIGHT, OTHER_EIGHT] * 2, [0, 0, 1, 1]),  # two machines, ranks dealt out in turn
        ([EIGHT[:4]] * 4 + [EIGHT[4:]] * 4, [0, 1, 2, 3, 0, 1, 2, 3]),  # two containers of one machine
        ([[gpu] for gpu in EIGHT], [0] * 8),  # a launcher that shows each rank its own
        ([EIGHT[:1]] * 4, [0, 0, 0, 0]),
        ([EIGHT[:2]] * 5, [0, 1, 0, 1, 0]),
        ([EIGHT[:2], EIGHT[:1]], [1, 0]),  # the rank that has no choice comes first
        ([EIGHT[:2], [], EIGHT[:2]], [0, None, 1]),
    ],
)
def test_a_rank_takes_the_gpu_with_the_fewest_others(visible, chosen):
    assert assign_gpus(visible) == chosen


def test_ranks_of_one_gpu_are_found():
    assert sharing_ranks([EIGHT] * 8) == []
    assert sharing_ranks([EIGHT[:4]] * 4 + [OTHER_EIGHT[:4]] * 4) == []
    assert sharing_ranks([EIGHT[:2]] * 5) == [[0, 2, 4], [1, 3]]
    assert sharing_ranks([[], []]) == []


def gpus(monkeypatch, uuids):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    properties = [types.SimpleNamespace(**({"uuid": uuid} if uuid else {})) for uuid in uuids]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)


def test_gpus_are_known_by_their_uuid(monkeypatch):
    assert visible_gpus() == []
    gpus(monkeypatch, ["a-1", "a-2"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,4")
    assert visible_gpus() == ["a-1", "a-2"]


def test_without_uuids_by_the_machine_and_the_number_on_it(monkeypatch, tmp_path):
    (tmp_path / "boot_id").write_text("m1\n")
    monkeypatch.setattr(devices, "_BOOT_ID", tmp_path / "boot_id")
    gpus(monkeypatch, [None, None])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["m1/0", "m1/1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,4")
    assert visible_gpus() == ["m1/5", "m1/4"]
    monkeypatch.setattr(devices, "_BOOT_ID", tmp_path / "nothing")
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    assert visible_gpus() == ["here/5", "here/4"]


@pytest.mark.parametrize(
    ("requested", "visible", "backend"),
    [
        ("auto", [EIGHT] * 8, "cpu:gloo,cuda:nccl"),
        ("nccl", [EIGHT] * 8, "cpu:gloo,cuda:nccl"),
        ("gloo", [EIGHT] * 8, "gloo"),
        ("auto", [EIGHT[:1]] * 2, "gloo"),
        ("gloo", [EIGHT[:1]] * 2, "gloo"),
    ],
)
def test_ranks_that_share_a_gpu_do_without_nccl(requested, visible, backend):
    assert choose_backend(settings(requested), GPU, 1, None, visible) == backend
    is_told = requested == "auto" and backend == "gloo"
    assert (sharing_warning(settings(requested), GPU, visible) is not None) is is_told


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl", "smddp"])
@pytest.mark.parametrize("device", [CPU, GPU])
def test_memory_is_shared_on_cpus_in_process_mode_or_where_asked_for(device, backend):
    on_cpus = device == CPU and backend == "gloo"
    for process_mode in (True, False):
        where = {"process_mode": process_mode}
        assert choose_host_collectives(settings(), device, backend, **where) is (on_cpus and process_mode)
        assert choose_host_collectives(settings(host_collectives=False), device, backend, **where) is False
        if on_cpus:
            assert choose_host_collectives(settings(host_collectives=True), device, backend, **where) is True
            continue
        with pytest.raises(SMPUserError, match="host_collectives is true") as caught:
            choose_host_collectives(settings(host_collectives=True), device, backend, **where)
        assert str(device) in str(caught.value)


@pytest.mark.parametrize("requested", ["nccl", "smddp"])
def test_what_needs_a_gpu_per_rank_is_refused_where_they_share(requested):
    with pytest.raises(SMPUserError) as caught:
        choose_backend(settings(requested), GPU, 2, None, [EIGHT[:2]] * 4)
    message = str(caught.value)
    assert f'"{requested}"' in message
    assert "ranks 0, 2 share a GPU (4 ranks see 2 GPUs in all)" in message
    assert "one process per GPU" in message
    assert '"gloo"' in message


@pytest.mark.parametrize("requested", ["auto", "nccl", "gloo"])
def test_for_tests_ranks_that_share_a_gpu_use_nccl(requested):
    visible = [EIGHT[:1]] * 2
    expected = "gloo" if requested == "gloo" else "cpu:gloo,cuda:nccl"
    assert choose_backend(settings(requested), GPU, 1, None, visible, "nccl") == expected
    warning = sharing_warning(settings(requested), GPU, visible, "nccl")
    assert (warning is None) is (requested == "gloo")
    if warning is not None:
        assert "ranks 0, 1 share a GPU" in warning
        assert "SMP_SHARED_GPU is nccl" in warning
    assert sharing_warning(settings(requested), GPU, [EIGHT] * 2, "nccl") is None


def test_nccl_gets_the_variables_of_its_release(monkeypatch):
    old, other = (nccl_sharing_variables(rank, (2, 28, 9)) for rank in range(2))
    assert old["NCCL_HOSTID"] != other.pop("NCCL_HOSTID")
    assert other.items() < old.items()
    assert old["NCCL_SOCKET_IFNAME"] == "lo"
    assert old["NCCL_P2P_DISABLE"] == old["NCCL_SHM_DISABLE"] == old["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in old
    new = nccl_sharing_variables(1, (2, 30, 0))
    assert new["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_HOSTID" not in new

    for name in old:
        monkeypatch.setenv(name, "eth0")  # a launcher may have set it; restored afterwards
    monkeypatch.setattr(devices, "nccl_version", lambda: (2, 28, 9))
    let_nccl_share(1, ["here", "here"])
    assert nccl_sharing_variables(1, (2, 28, 9)).items() <= os.environ.items()


@pytest.mark.parametrize("machines", [["here", "there"], ["here", ""]])
def test_across_machines_no_gpu_is_shared_over_nccl(machines):
    with pytest.raises(SMPUserError, match=r"SMP_SHARED_GPU is nccl, but the 2 ranks are on 2 machines"):
        let_nccl_share(0, machines)


def test_the_release_of_nccl_is_that_of_the_loaded_library(monkeypatch):
    class Library:
        def ncclGetVersion(self, number):  # noqa: N802 - NCCL's name
            number._obj.value = 23007
            return 0

    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert nccl_version() == (2, 28, 9)  # no library is loaded here
    monkeypatch.setattr("ctypes.CDLL", lambda name, mode: Library())
    assert nccl_version() == (2, 30, 7)


def test_a_wrong_value_for_shared_gpus_is_refused(monkeypatch):
    from smp_runtime.job import session

    assert read_shared_gpu({}) == read_shared_gpu({"SMP_SHARED_GPU": ""}) == "gloo"
    assert read_shared_gpu({"SMP_SHARED_GPU": "nccl"}) == "nccl"
    monkeypatch.setenv("SMP_SHARED_GPU", "NCCL")
    with pytest.raises(ConfigError, match=r"SMP_SHARED_GPU is .NCCL.; .* set gloo .* or nccl") as raised:
        session.init({})
    assert raised.value.code == "SMP106"


def test_ranks_must_agree_on_shared_gpus(ranks):
    from support.ranks.rank_pool import RankFailed

    def run():
        import os

        from smp_runtime.job import session

        if os.environ["RANK"] == "1":
            os.environ["SMP_SHARED_GPU"] = "nccl"
        session.init({"ddp": True})

    with pytest.raises(RankFailed, match="SMP_SHARED_GPU is nccl on rank 1, but gloo on rank 0"):
        ranks(run, 2, init=False)


def test_on_the_cpu_nothing_changes():
    assert choose_backend(settings(), CPU, 2, None, [[], []]) == "gloo"
    assert sharing_warning(settings(), CPU, [[], []]) is None
    with pytest.raises(SMPUserError, match="no CUDA device"):
        choose_backend(settings("nccl"), CPU, 1, None, [[]])


def test_gloo_sends_no_tensors_of_a_gpu_between_stages():
    assert channel_backend(GPU, "cpu:gloo,cuda:nccl") == "nccl"
    assert channel_backend(GPU, "smddp") == "nccl"
    assert channel_backend(GPU, "gloo") is None
    assert channel_backend(CPU, "gloo") is None


def test_a_new_backend_is_a_record(monkeypatch):
    monkeypatch.setitem(
        TRAITS, "ucc", BackendTraits("ucc if asked for", for_gpus="ucc", needs_gpu=True, order="stream")
    )
    asked = settings().model_copy(update={"ddp_dist_backend": "ucc"})
    made = choose_backend(asked, GPU, 1, None, [EIGHT] * 8)
    assert made == "cpu:gloo,cuda:ucc"
    assert channel_backend(GPU, made) == "ucc"
    assert traits_of_group(made, "cuda").order == "stream"
    assert implementation_of("ucc").connect_pair is None
    with pytest.raises(SMPUserError, match='"ucc", which takes one rank per GPU'):
        choose_backend(asked, GPU, 1, None, [EIGHT[:1]] * 2)
    with pytest.raises(SMPUserError, match='"ucc", but this process has no CUDA device'):
        choose_backend(asked, CPU, 1, None, [[]])


def test_a_step_keeps_the_order_of_the_scripts_stream(monkeypatch):
    done = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            done.append(f"{self.name} waits for {other.name}")

    default, side = Stream("default"), Stream("side")
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: side)
    with devices.in_order_with_script(GPU):
        done.append("step")
    assert done == ["default waits for side", "step", "side waits for default"]
    done.clear()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: default)
    with devices.in_order_with_script(GPU), devices.in_order_with_script(CPU):
        done.append("step")
    assert done == ["step"]


# -- what lies where ---------------------------------------------------------------------------------------------------


class Follower(nn.Module):
    """Moves a tensor of its own when it is moved, has a buffer that others share, and a weight that is tied."""

    def __init__(self, shared: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.own = nn.Parameter(torch.ones(4))
        self.register_buffer("shared", shared)
        self.table = torch.ones(4)

    def _apply(self, fn, recurse=True):
        self.table = fn(self.table)
        return super()._apply(fn, recurse)

    def forward(self, x):
        return self.layer(x) * self.own + self.shared + self.table


def build():
    torch.manual_seed(0)
    shared = torch.ones(4)
    net = nn.Sequential(*(Follower(shared) for _ in range(4)))
    net[1].layer.weight = net[0].layer.weight
    return net


def test_the_model_is_wholly_on_a_device_only_while_it_is_traced(monkeypatch):
    def places():
        return {name: tensor.data_ptr() for name, tensor in net.state_dict(keep_vars=True).items()}

    net = build()
    net[0].own.grad = gradient = torch.ones(4)
    before, shared, place = places(), net[0].shared, gradient.data_ptr()
    # What a move does to the tensors of a module, apart from the other device.
    monkeypatch.setattr(net, "to", lambda device: net._apply(torch.clone))
    inside = []

    def trace():
        with _wholly_on(net, GPU):
            inside.extend(places().values())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trace()
    assert not set(before.values()) & set(inside)
    assert places() == before
    assert net[3].shared is shared
    assert net[0].own.grad is gradient
    assert gradient.data_ptr() == place


@pytest.mark.parametrize("skips", [True, False])
def test_only_the_rank_that_traces_moves_the_whole_model(ranks, skips):
    def run(build):
        import torch

        import smdistributed.modelparallel.torch as smp

        net = build()
        for number, part in enumerate(net):
            smp.set_partition(part, int(number >= 2))
        moves = []
        net.to = lambda device: moves.append(str(device)) or net
        model = smp.DistributedModel(net)
        loss = float(summing_step(model)(torch.ones(2, 4)).reduce_mean())
        # Where everything of this stage would go, on another kind of device.
        model._stages.move(torch.device("meta"))
        mine = [part for number, part in enumerate(net) if (number >= 2) == smp.pp_rank()]
        return loss, moves, all(t.is_meta for part in mine for t in (*part.parameters(), *part.buffers(), part.table))

    config = {"pipeline_parallel_degree": 2, "ddp": True, "skip_tracing": skips}
    (loss, moves, first), (other, no_moves, second) = ranks(run, 2, build, config=config)
    assert loss == other
    assert first
    assert second
    assert (moves, no_moves) == ([] if skips else ["cpu"], [])


def test_a_model_too_large_to_trace_says_what_to_change():
    def run():
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    with pytest.raises(SMPUserError) as caught:
        deciding._traced(nn.Linear(2, 2), deciding.Tracing(run, GPU), settings())
    message = str(caught.value)
    assert "cuda:0" in message
    assert "2.00 GiB" in message
    assert "\n" not in message
    assert 'trace_device="cpu"' in message
    assert "skip_tracing" in message
