"""The all-gather of SMDDP and training over it, between two hosts with a limited link, against the plain backend.

    python benchmarks/strategies/smddp.py                    # 2 hosts × 2 ranks and 2 × 4; as root, on Linux
    python benchmarks/strategies/smddp.py --ranks-per-host 2 --rounds 5
    python benchmarks/strategies/smddp.py --delay-ms 0       # the kernel's queue alone: no delay, and no relay

Two network namespaces are the hosts; 1 Gbit/s goes between them each way and takes 1 ms more, on a wire that a process of
its own carries (``wire.py``; it takes a part of a CPU, the same for all sides). What one TCP connection gets of each link
is measured and printed first. Times are those of the slowest rank, in turns A B A B …, and the ratio is the median of those
of neighbours. Bytes are what came over the link, headers included (``namespaces.received``), divided by the least that has
to come to one host: (n−g)/n · S for an all-gather of S bytes over n ranks, g on each host. The plain backend is gloo: its
own all-gather (a ring), and for the training the one that the library uses with it, with ``sdp_hierarchical_allgather`` off
and on.

The rows of large models (``--only units``) gather, forward and backward, units whose shards have as many bytes as those of
the published configuration in bf16: a layer, and what lies before and after the layers, through buffers of the default sizes.
Of the whole there is what so few ranks put together (n of 16 shards of NeoX-20B), its weights are frozen, and the other layers,
which are alike, are left out: bytes are counted there, not times.

The link and the CPU are simulated: nothing here is claimed of NCCL, EFA or GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules that benchmarks share
from launching import print_machine
from namespaces import DELAY, measure, received, run_ranks_on, two_hosts, why_not

MIB = 2**20
WHAT = ["gather", "train", "units"]
#: MiB of the whole, and how often each side gathers it in one round.
SIZES = {1: 20, 4: 10, 16: 4, 64: 2}


def slowest(run: Callable[[], Any], group: Any = None) -> float:
    """Return the seconds of the slowest rank."""
    import torch
    import torch.distributed as dist

    dist.barrier(group)
    start = time.perf_counter()
    run()
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
    return float(taken)


def compare(sides: dict[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Measure seconds and received bytes per run of each side, in turns."""
    import torch.distributed as dist

    times: dict[str, list[float]] = {name: [] for name in sides}
    came = dict.fromkeys(sides, 0.0)
    for run in sides.values():
        run()
    for _ in range(rounds):
        for name, run in sides.items():
            dist.barrier()
            before = received()
            times[name].append(slowest(run))
            came[name] += (received() - before) / rounds
    return times, came


def ratio(one: list[float], other: list[float]) -> float:
    """Return the median of the ratios of neighbours."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def gather_rank(rounds: int) -> None:
    """Run both all-gathers at all sizes on one rank."""
    import torch
    import torch.distributed as dist

    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401  # registers the backend

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ["SMP_RANKS_PER_HOST"])
    dist.init_process_group("smddp", init_method=os.environ["SMP_MEET"], rank=rank, world_size=size)
    gloo = dist.new_group(backend="gloo")
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before PyTorch 2.13
    for mib, times in SIZES.items():
        shard, full = torch.full((mib * MIB // 4 // size,), float(rank)), torch.empty(mib * MIB // 4)
        sides = {
            "smddp": lambda full=full, shard=shard: gather(full, shard),
            "gloo": lambda full=full, shard=shard: gather(full, shard, group=gloo),
        }
        taken, came = compare(sides, max(2, times * rounds // 10))
        if not torch.equal(full.view(size, -1)[:, 0], torch.arange(float(size))):
            raise AssertionError("the all-gather gave something else")
        bound = (size - local) / size * mib * MIB
        if rank == 0:
            print(
                json.dumps(
                    {
                        "MiB": mib,
                        **{f"{name}_ms": round(1e3 * statistics.median(s), 1) for name, s in taken.items()},
                        "ratio": round(ratio(taken["smddp"], taken["gloo"]), 3),
                        **{f"{name}_bytes/bound": round(b / bound, 3) for name, b in came.items()},
                    }
                ),
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


def make_gpt() -> Any:
    """Make the model of the main job, with much to gather and little to compute."""
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "entrypoints"))
    import train_gpt

    torch.manual_seed(0)
    return train_gpt.GPT(train_gpt.GPTConfig(layers=4, hidden=512, heads=8, seq_len=128))


def train_rank(rounds: int) -> None:
    """Train one GPT with sharded data parallelism on one rank: over SMDDP, over gloo, and over gloo in phases."""
    import torch
    import torch.nn.functional as F

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.job import session as sessions

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    elements = sum(p.numel() for p in make_gpt().parameters())
    ids = torch.randint(256, (1, 17), generator=torch.Generator().manual_seed(rank))
    sides, losses = {}, {}
    # The first one starts torch.distributed, with gloo; that of SMDDP then makes groups of its own.
    kinds = {"gloo": ("gloo", False), "gloo in phases": ("gloo", True), "smddp": ("smddp", True)}
    made = []

    def prepare(name: str, backend: str, hierarchical: bool) -> None:
        # One job has one session; here each side has its own, over one control plane.
        session = sessions.init(
            {
                "ddp": True,
                "ddp_dist_backend": backend,
                "sharded_data_parallel_degree": size,
                "sdp_param_persistence_threshold": 0,
                "sdp_max_live_parameters": 10**9,
                "sdp_hierarchical_allgather": hierarchical,
                "sdp_gradient_clipping": 1e9,
            }
        )
        model = smp.DistributedModel(make_gpt())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
        made.append((session, model, optimizer))
        sessions._session = None

        def update() -> None:
            sessions._session = session
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses[name] = float(loss.detach())

        sides[name] = update

    for name, (backend, hierarchical) in kinds.items():
        prepare(name, backend, hierarchical)
    for _ in range(2):  # let each side learn its order
        for update in sides.values():
            update()
    taken, came = compare(sides, max(4, rounds))
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise AssertionError(f"the sides do not train the same model: losses {losses}")
    if rank == 0:
        print(
            json.dumps(
                {
                    "training": f"GPT of {elements / 1e6:.1f} M parameters, degree {size}",
                    **{f"{name}_ms": round(1e3 * statistics.median(s), 1) for name, s in taken.items()},
                    "ratio": round(ratio(taken["smddp"], taken["gloo"]), 3),
                    "ratio_to_phases": round(ratio(taken["smddp"], taken["gloo in phases"]), 3),
                    **{f"{name}_MB": round(b / 1e6, 1) for name, b in came.items()},
                }
            ),
            flush=True,
        )
    torch.distributed.barrier()
    os._exit(0)  # three sessions were never meant to close in one process


#: Published configurations by name: a shape, and the degree that makes its shards.
ROWS = {
    "NeoX-20B / 16": ("gpt-neox-20b", 16),
    "NeoX-20B / 32": ("gpt-neox-20b", 32),
    "30B / 64": ("gpt2-30b", 64),
    "65B / 16": ("gpt-neox-65b", 16),
}


def make_units(shape: Any, degree: int, ranks: int) -> Any:
    """Make the units of one layer and of what is outside the layers, so that ``ranks`` shards are as large as the row's."""
    import torch
    from torch import nn

    class Unit(nn.Module):
        def __init__(self, elements: list[int]) -> None:
            super().__init__()
            for number, count in enumerate(elements):
                weight = torch.zeros(count * ranks // degree // shape.hidden, shape.hidden, dtype=torch.bfloat16)
                self.register_parameter(f"weight_{number}", nn.Parameter(weight, requires_grad=False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.parameters():
                x = x + (x @ weight.T).mean()
            return x

    units: dict[int | None, list[int]] = {}
    for weight in shape.tensors():
        if weight.layer in (-1, 0, None) and weight.elements >= 1_000_000:  # the others stay whole
            units.setdefault(weight.layer, []).append(weight.elements)
    return nn.ModuleList(Unit(elements) for elements in units.values())


def units_rank(rounds: int) -> None:
    """Gather units as large as those of published configurations on one rank, through buffers of the default sizes."""
    import torch

    import smdistributed.modelparallel.torch as smp
    from smp_config import Group
    from smp_config.smddp import BufferSizes
    from smp_estimator.planning import named_shape
    from smp_runtime.job import session as sessions

    size, local = int(os.environ["WORLD_SIZE"]), int(os.environ["SMP_RANKS_PER_HOST"])
    for row, (name, degree) in ROWS.items():
        shape = named_shape(name)
        units = make_units(shape, degree, size)
        largest = max(sum(p.numel() for p in unit.parameters()) for unit in units)
        settings = {
            "ddp": True,
            "bf16": True,
            "ddp_dist_backend": "smddp",
            "sharded_data_parallel_degree": size,
            "sdp_param_persistence_threshold": 0,
            "sdp_max_live_parameters": largest,
        }
        session = sessions.init(settings)

        class Model(torch.nn.Module):
            def __init__(self, units: Any) -> None:
                super().__init__()
                self.units = units

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for unit in self.units:
                    x = unit(x)
                return x

        model = smp.DistributedModel(Model(units))
        group = session.groups.group(Group.SHARD)
        torch.distributed.barrier()
        before, put_in = received(), group.bytes_in_phases + group.bytes_fallen_back
        for _ in range(max(1, rounds // 5)):
            model(torch.ones(1, shape.hidden, requires_grad=True)).sum().backward()
        torch.distributed.barrier()
        came, put_in = received() - before, group.bytes_in_phases + group.bytes_fallen_back - put_in
        if smp.rank() == 0:
            shards = [unit.shard.nbytes for unit in model.shards.units]
            found = {
                "row": row,
                "shards_MiB": [round(shard / MIB, 1) for shard in shards],
                "pieces": [BufferSizes().pieces(shard, size // local, local) for shard in shards],
                "share": round(group.bytes_in_phases / (group.bytes_in_phases + group.bytes_fallen_back), 4),
                "gathered_MB": round(size * put_in / 1e6),
                "bytes/bound": round(came / ((size - local) * put_in), 3),
            }
            print(json.dumps(found), flush=True)
        sessions._session = None
        del model, units
    torch.distributed.barrier()
    os._exit(0)  # as above


def _meet_at_a_store() -> None:
    """Agree on a port inside the namespace: the first rank's store picks one and says it in a file."""
    import torch.distributed as dist

    meeting, rank = Path(os.environ["SMP_MEET"].removeprefix("file://") + "-port"), int(os.environ["RANK"])
    if rank == 0:
        global _store
        _store = dist.TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False)
        meeting.with_suffix(".new").write_text(str(_store.port))
        meeting.with_suffix(".new").rename(meeting)
    deadline = time.monotonic() + 60
    while not meeting.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the first rank did not say its port within 60 s")
        time.sleep(0.02)  # polling: a new file sends no event
    os.environ.update(MASTER_PORT=meeting.read_text(), TORCHELASTIC_USE_AGENT_STORE="True")


_store: Any = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks-per-host", type=int, action="append", help="default: 2 and 4")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--delay-ms", type=float, default=1e3 * DELAY, help="each way; default: %(default)g; 0: no relay"
    )
    parser.add_argument("--only", choices=WHAT, help="default: all")
    parser.add_argument("--rank-of", choices=WHAT, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        import torch

        warnings.filterwarnings("ignore", category=FutureWarning)
        torch.set_num_threads(1)
        if args.rank_of == "gather":
            gather_rank(args.rounds)
        else:
            _meet_at_a_store()
            (train_rank if args.rank_of == "train" else units_rank)(args.rounds)
        return
    if (reason := why_not(args.delay_ms / 1e3)) is not None:
        print(f"skipped: {reason}")
        return
    print_machine()
    for per_host in args.ranks_per_host or [2, 4]:
        with two_hosts(delay=args.delay_ms / 1e3) as link:
            print(f"\n2 hosts × {per_host} ranks; {link.describe()}\nmeasured: {measure(link).describe()}", flush=True)
            for what in [args.only] if args.only else WHAT:
                with tempfile.TemporaryDirectory() as folder:
                    words = [__file__, "--rank-of", what, "--rounds", str(args.rounds)]
                    meeting = {"SMP_MEET": f"file://{folder}/meet", "SMP_RANKS_PER_HOST": str(per_host)}
                    print(run_ranks_on(link, per_host, words, meeting), end="", flush=True)
            print(f"the link: {link.faults()}")


if __name__ == "__main__":
    main()
