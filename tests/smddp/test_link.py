"""Bytes between two hosts in network namespaces, counted at the link, against the least that must come."""

from __future__ import annotations

import subprocess
import textwrap

import pytest
from namespaces import run_ranks_on, two_hosts, why_not

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import os, sys, torch, torch.distributed as dist, warnings
warnings.filterwarnings("ignore")
sys.path.insert(0, {benchmarks!r})
from namespaces import received
import smdistributed.dataparallel.torch.torch_smddp
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before PyTorch 2.13
rank, size, mib = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 2**20
dist.init_process_group("smddp", init_method={meet!r}, rank=rank, world_size=size)
gloo = dist.new_group(backend="gloo")
full, shard, came = torch.empty(2 * mib), torch.full((2 * mib // size,), float(rank)), []
for group in (None, gloo):
    dist.barrier()
    gather(full, shard, group=group)
    assert full.view(size, -1)[:, -1].tolist() == [float(r) for r in range(size)]
    dist.barrier()
    before = received()
    dist.barrier()  # nobody sends before all have looked
    for _ in range(3):
        gather(full, shard, group=group)
    dist.barrier()
    came.append((received() - before) / 3 / full.nbytes)
if rank == 0:
    print(*came)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.full  # bytes to the other host are counted in test_sharded_training.py always
@pytest.mark.job
def test_every_byte_crosses_the_link_once(tmp_path):
    import namespaces

    if (reason := why_not()) is not None:
        pytest.skip(reason)
    folder = str(namespaces.__file__).rpartition("/")[0]
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(SCRIPT.format(benchmarks=folder, meet=f"file://{tmp_path}/meet")))
    with two_hosts() as link:
        printed = run_ranks_on(link, 2, [str(script)], timeout=150)
    ours, ring = map(float, printed.splitlines()[-1].split())  # gloo of older releases talks before
    bound = (4 - 2) / 4  # (n−g)/n
    assert bound <= ours <= 1.05 * bound
    assert ring >= 1.45 * bound  # gloo's own: (n−1)/n
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(host.name in left for host in link.hosts)
