"""The first values that ranks agree on: what they have alike is not sent, and stays where it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from smp_runtime.comm.collectives import TorchCollectives, broadcast_tensors

MIB = 2**20


class Counting(TorchCollectives):
    """Bytes that are broadcast."""

    def __init__(self):
        self.sent = 0

    def broadcast(self, tensor, source, group):
        self.sent += tensor.nbytes
        return super().broadcast(tensor, source, group)


def _written(path):
    """KiB of a mapped file that this process has written to."""
    total, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            is_file = line.endswith(path)
        elif is_file and line.startswith("Anonymous:"):
            total += int(line.split()[1])
    return total


def _agree(path, dtype):
    import smdistributed.modelparallel.torch as smp
    from smp_config import Group

    ranks = smp.init({"ddp": True}).ranks
    count = 2 * MIB // dtype.itemsize
    mapped = torch.from_file(path, shared=False, size=count, dtype=dtype)
    own = torch.full((count,), smp.rank(), dtype=dtype)
    last = torch.zeros(count, dtype=dtype)
    last[-1] = smp.rank()  # one number is another
    small, whole = torch.full((3,), smp.rank()), torch.full((count,), smp.rank() == 1)
    turned = torch.full((64, count // 64), smp.rank(), dtype=dtype)
    if smp.rank():  # as weights are that only one rank has loaded from elsewhere
        turned = turned.t().contiguous().t()
    counter = Counting()
    broadcast_tensors([mapped, own, last, small, whole, turned], 1, ranks.groups.group(Group.WORLD), counter)
    alike = all(bool((tensor == 1).all()) for tensor in (own, small, whole, turned)) and float(last.sum()) == 1
    return alike, float(mapped.float().sum()), _written(path), counter.sent / MIB


@pytest.mark.both_transports
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_values_are_neither_sent_nor_written(ranks, tmp_path, dtype):
    path = str(tmp_path / "weights")
    values = torch.arange(2 * MIB // dtype.itemsize).remainder(100).to(dtype)
    Path(path).write_bytes(values.view(torch.uint8).numpy().tobytes())
    bools = 2 / dtype.itemsize
    for alike, total, written, sent in ranks(_agree, 2, path, dtype, init=False):
        assert alike
        assert total == float(values.float().sum())
        assert written == 0
        assert sent == pytest.approx(6 + bools, abs=0.01)  # all but the mapped one
