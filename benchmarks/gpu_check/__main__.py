"""Runs checks of the library on one GPU.

    python benchmarks/gpu_check list                                      the checks, with their time limits
    python benchmarks/gpu_check drive --out DIR --budget 540              all checks, the most important first
    python benchmarks/gpu_check drive --part a --skip env                 part a without one check
    python benchmarks/gpu_check run NAME --tiny                           one check, in this process, with tiny models

Each check is a process of its own with a time limit. What it finds is printed as one JSON line per finding, and kept in
DIR/results.jsonl. The ends of the logs of failed checks are in DIR/failures.txt, those of all checks in DIR/logs.txt.
No mpirun, no network and no pytest is needed. The exit status of ``drive`` is 0 if all checks have passed.

Without a GPU the same code runs on the CPU: use --tiny. SMPCHECK_EMULATE=checked replaces the GPU by the project's emulated
devices, which look for missing waits between streams.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys
import tempfile
from pathlib import Path

if not __package__:
    # ``python benchmarks/gpu_check`` puts this folder first. Its modules would be importable by bare names.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from gpu_check import catalog, environment
from gpu_check.driver import Driver


def parse_arguments() -> argparse.Namespace:
    """Return the command line's arguments, with the checks that ``drive`` runs in ``checks``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["drive", "run", "rank", "list"])
    parser.add_argument("words", nargs="*", help="of run: the check; of rank: MODULE:FUNCTION and its arguments")
    default = os.environ.get("OUT", os.path.join(tempfile.gettempdir(), "gpu_check"))
    parser.add_argument("--out", type=Path, default=Path(default), help="folder of the results")
    budget = float(os.environ.get("SMPCHECK_BUDGET", "540"))
    parser.add_argument("--budget", type=float, default=budget, help="seconds for all checks")
    parser.add_argument("--began", type=float, default=0.0, help="start of the budget, as time.time() returns it")
    parser.add_argument("--only", default="", help="names of checks, separated by commas")
    parser.add_argument("--skip", default="", help="names of checks, separated by commas")
    parser.add_argument("--part", choices=["a", "b"], default="", help="a: starting and numbers; b: costs and the rest")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps")
    parser.add_argument("--beside", type=int, default=7, help="checks that run at the same time")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies time limits, for a slow machine")
    arguments = parser.parse_args()
    if arguments.what in ("run", "rank") and not arguments.words:
        parser.error(f"{arguments.what} needs a name; python benchmarks/gpu_check list shows the checks")
    only, skip = ([name for name in given.split(",") if name] for given in (arguments.only, arguments.skip))
    checked = arguments.words[:1] if arguments.what == "run" else [*only, *skip]
    if unknown := [name for name in checked if name not in catalog.BY_NAME]:
        parser.error(f"no check is called {', '.join(unknown)}; python benchmarks/gpu_check list shows the checks")
    arguments.checks = [
        catalog.BY_NAME[name]
        for name in only or catalog.BY_NAME
        if name not in skip and arguments.part in ("", catalog.BY_NAME[name].part)
    ]
    return arguments


def run_here(what: str, name: str, words: list[str]) -> None:
    """Run a check, or what a rank of a check does, in this process."""
    environment.extend_path()
    if what == "run":
        check = catalog.BY_NAME[name]
        module, function, is_emulated = check.module, f"check_{name}", check.trains_here
    else:
        module, _, function = name.partition(":")
        is_emulated = True
    faulthandler.enable()
    # Shows where the check is when its time is over.
    faulthandler.dump_traceback_later(max(1.0, environment.count_seconds_left() - 2), exit=False)
    if is_emulated and environment.is_emulated():
        from smp_emulation.checked import emulated

        with emulated(1, devices=int(os.environ.get("WORLD_SIZE", "1"))) as emulation:
            getattr(importlib.import_module(f"gpu_check.checks.{module}"), function)(*words)
        print("waits", emulation.waits)
    else:
        getattr(importlib.import_module(f"gpu_check.checks.{module}"), function)(*words)


def main() -> int:
    arguments = parse_arguments()
    if arguments.tiny:
        os.environ["SMPCHECK_TINY"] = "1"
    if arguments.what == "list":
        print("\n".join(map(str, catalog.CHECKS)))
        return 0
    if arguments.what == "drive":
        driver = Driver(arguments.out, arguments.budget, arguments.began, arguments.patience)
        return 0 if driver.run_all(arguments.checks, arguments.beside) else 1
    run_here(arguments.what, arguments.words[0], arguments.words[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
