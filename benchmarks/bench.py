"""One runner for the figures of docs/how-it-works/performance.md: each benchmark in turn, results as JSON, tables and a picture.

    make bench-quick                                  # a few cases of each, under five minutes
    make bench                                        # all tables of docs/how-it-works/performance.md
    python benchmarks/bench.py run --only pipeline --only starting
    python benchmarks/bench.py list
    python benchmarks/bench.py write                  # the tables of that page and the picture, from the file

A run replaces the results of its suites in the file and leaves those of others. Within a benchmark this library and its peer train
in the same processes in turns, so what else the machine does meets both; the load before each is in the file. A suite that fails,
or does not end in time, keeps its former result; the run goes on and ends with status 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import results
from suites import SUITES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "how-it-works" / "performance.md"
PICTURES = ROOT / "docs" / "pictures"
FILE = Path(__file__).with_name("results.json")


def run(chosen: Sequence[results.Suite], quick: bool, file: Path, seconds: float) -> int:
    """Run suites one after another; returns how many have failed."""
    failed = 0
    for suite in chosen:
        words = suite.quick if quick else suite.words
        if words is None:
            continue
        python = str(ROOT / suite.python) if suite.python else sys.executable
        if not os.path.exists(python):
            print(f"== {suite.title}: left out, {suite.python} is not there", flush=True)
            continue
        shown = " ".join(["python", f"benchmarks/{suite.script}", *words])
        print(f"== {suite.title}: {shown}", flush=True)
        load, began = os.getloadavg()[0], time.monotonic()
        lines, problem = measured([python, str(ROOT / "benchmarks" / suite.script), *words], seconds)
        took = time.monotonic() - began
        if problem or not lines:
            failed += 1
            print(f"   failed after {took:.0f} s: {problem or 'it printed no figures'}", flush=True)
            continue
        print("\n".join(results.table(suite, lines)), f"   {took:.0f} s", sep="\n", flush=True)
        # Read again: a run beside this one may have written meanwhile.
        kept = results.read(file)
        kept["suites"][suite.name] = {
            "command": shown,
            "date": datetime.date.today().isoformat(),
            "machine": results.machine(),
            "load": load,
            "seconds": round(took, 1),
            "lines": lines,
        }
        file.write_text(json.dumps(kept, indent=1) + "\n")
    return failed


def measured(command: Sequence[str], seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Return the figures that a benchmark prints, and what went wrong with it in one line.

    Its ranks are of its own session, so that none is left behind where it does not end in time.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            printed, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            printed, errors = process.communicate()
            return results.lines_of(printed), f"it had not ended after {seconds:.0f} s"
    lines = results.lines_of(printed)
    if process.returncode == 0:
        return lines, ""
    last = [line for line in errors.splitlines() if line.strip()] or [f"status {process.returncode}"]
    told = [line for line in last if "Error" in line and "ChildFailedError" not in line] or last
    return lines, told[-1].strip()


def write(file: Path) -> None:
    """Write the page's tables and the picture from the results."""
    found = results.read(file)
    PAGE.write_text(results.filled(PAGE.read_text(), SUITES, found))
    PICTURES.mkdir(exist_ok=True)
    results.draw(PICTURES / "ratios.svg", SUITES, found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the suites, and what each runs")
    for name, text in (("run", "measure"), ("write", "the tables of the page, and the picture")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--file", type=Path, default=FILE, help="of results; default: benchmarks/results.json")
        if name == "run":
            command.add_argument(
                "--quick", action="store_true", help="few cases and rounds, into a file of its own by default"
            )
            command.add_argument("--only", action="append", choices=[suite.name for suite in SUITES])
            command.add_argument("--seconds", type=float, default=1800, help="after which a suite is given up")
    args = parser.parse_args()
    if args.command == "list":
        for suite in SUITES:
            print(f"{suite.name:22} {suite.title}: {suite.script} {' '.join(suite.words)}")
        return 0
    if args.command == "write":
        write(args.file)
        return 0
    if args.quick and args.file == FILE:  # few rounds say less, and do not take the place of a whole run
        args.file = FILE.with_name("results-quick.json")
    chosen = [suite for suite in SUITES if not args.only or suite.name in args.only]
    return 1 if run(chosen, args.quick, args.file, args.seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
