"""How often the host waits for its device in a step, by strategy and line: on emulated devices, which count it.

    python benchmarks/strategies/host_waits.py                # all strategies, as a table
    python benchmarks/strategies/host_waits.py pipeline --lines

Every wait leaves the GPU without work for the time that the host needs to queue more. Each strategy trains twice, with
some steps and with more; the difference is what a step costs, without preparation and end. Waits of the program itself,
which reads its loss and moves its batch, do not count.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.ranks.rank_pool import RankPool
from support.training.emulated_training import PATHS

STRATEGIES = {
    "data parallelism": "reduction",
    "fp16, sharded optimizer state": "fp16, sharded state",
    "sharded data parallelism": "sharding",
    "the same over SMDDP": "smddp",
    "tensor parallelism": "tensor parallelism",
    "pipeline, 2 stages": "pipeline",
    "offloaded activations": "offloading",
}
SHORT, LONG = 4, 8
#: Where the programs are, and what brings them their batches.
_PROGRAM = ("support/",)


def _counted(path: Any, steps: int) -> dict[tuple[str, str], int]:
    import functools

    from support.ranks import emulated
    from support.training import emulated_training

    emulated_training.STEPS = steps
    return emulated_training.run(path, "", functools.partial(emulated.on_devices, 0))["waits"]


def waits_per_step(pool: RankPool, name: str) -> Counter[tuple[str, str]]:
    """Return, by kind and line, the waits of the rank that waits most in a step."""
    path = PATHS[name]
    short, long = (pool.run(_counted, path.world, path, steps, init=False, timeout=300) for steps in (SHORT, LONG))
    most: Counter[tuple[str, str]] = Counter()
    for few, many in zip(short, long, strict=True):
        mine = Counter({key: (many[key] - few.get(key, 0)) / (LONG - SHORT) for key in many})
        most = max(most, +mine, key=lambda counted: sum(counted.values()))
    return most


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategies", nargs="*", help=f"of {', '.join(STRATEGIES.values())}")
    parser.add_argument("--lines", action="store_true", help="say where")
    options = parser.parse_args(arguments)
    print("| | waits per step |\n|---|---|")
    with RankPool(4) as pool:
        for title, name in STRATEGIES.items():
            if options.strategies and name not in options.strategies:
                continue
            found = waits_per_step(pool, name)
            own = {key: count for key, count in found.items() if not key[1].startswith(_PROGRAM)}
            print(f"| {title} | {sum(own.values()):g} |", flush=True)
            for (kind, line), count in sorted(own.items(), key=lambda item: -item[1]) if options.lines else ():
                print(f"|   {kind} at {line} | {count:g} |")


if __name__ == "__main__":
    main()
