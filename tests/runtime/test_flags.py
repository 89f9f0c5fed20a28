"""Flags of a window go by hosts where tensors lie on a GPU, and norms and clipping leave the host alone there."""

from __future__ import annotations

import pytest
import torch

from smp_runtime.comm.collectives import NOTHING
from smp_runtime.comm.flag_all_reduce import MOST_HOSTS, FlagAllReduce, travel_by_host
from smp_runtime.optim.gradient_norms import multiply, scale_down

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def test_many_ranks_let_their_gpus_tell_one_another():
    assert travel_by_host(GPU, 2)
    assert travel_by_host(GPU, MOST_HOSTS)
    assert not travel_by_host(GPU, MOST_HOSTS + 1)
    assert not travel_by_host(CPU, 2)  # there they are behind the gradients


class _Twice:
    """Collectives of two ranks that have the same."""

    devices = ()

    def all_reduce(self, tensor, group):
        self.devices += (tensor.device.type,)
        tensor.mul_(2)
        return NOTHING


@pytest.mark.parametrize("device", [GPU, CPU])
def test_flags_are_summed_in_the_hosts_memory(device):
    collectives = _Twice()
    assert FlagAllReduce(torch.tensor([1.0, 0.0]), device, collectives, None, 2).finish().tolist() == [2, 0]
    assert collectives.devices == ("cpu",)


def test_gradients_are_scaled_by_a_factor_that_is_not_rounded():
    short = [torch.full((2,), 3.0)]
    assert scale_down(short, 5.0, torch.tensor(4.0, dtype=torch.float64)) is None
    assert short[0].tolist() == [3, 3]
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    long = [torch.full((2,), 3.0, dtype=dtype) for dtype in kinds]
    factor = scale_down(long, 1.0, torch.tensor(3.0, dtype=torch.float64))
    assert factor.item() == pytest.approx(1 / (3 + 1e-6), rel=1e-12)
    for tensor in long:
        torch.testing.assert_close(tensor.double(), torch.full((2,), 1 / (1 + 1e-6 / 3)).double(), rtol=1e-6, atol=1e-6)
    nothing = [torch.ones(1)]
    scale_down(nothing, 1.0, torch.tensor(float("nan")))
    assert nothing[0].isnan().all()


def test_a_factor_on_another_device_is_not_read_by_the_host():
    # Of the meta device there is nothing to read: whoever tried would get an error.
    factor = torch.empty((), dtype=torch.float64, device="meta")
    multiply([torch.empty(3, dtype=dtype, device="meta") for dtype in (torch.float32, torch.bfloat16)], factor)
    assert scale_down([torch.empty(3, device="meta")], 1.0, torch.empty((), device="meta")).device.type == "meta"
