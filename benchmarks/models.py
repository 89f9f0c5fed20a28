"""Every language model of Transformers under every mode, against one process: equal or not, and how much each rank is spared.

    python benchmarks/models.py run OUTCOMES.jsonl [--modes "pp 2" "tp 2"] [--families llama t5] [--seconds 500]
    python benchmarks/models.py write OUTCOMES.jsonl …

``run`` appends a line of JSON for each family and mode that the file lacks with these versions, so that an interrupted run goes on
where it was. A family whose ranks fail, or do not answer in time, costs a new pool of them and nothing else. ``write`` puts them
into ``smp_estimator/models/outcomes.json``, which ``smp-estimator models`` shows, and writes ``docs/models.md``.

Models are the entries of Transformers' mappings for causal, sequence to sequence and masked language models, in the tiny
configurations of ``tests/support/models/tiny_families.py``: 2 layers of width 32, 4 heads, 3 steps of 4 samples of 16 tokens in
float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from support.models.tiny_families import Family, families
from support.ranks.rank_pool import RankFailed, RankPool
from support.training.family_training import MODES, Distance, distance, note_alone

ALONE = "one process"
DEADLINE = 90.0  # seconds for a family and mode


def versions() -> dict[str, str]:
    """Return the versions that the outcomes depend on."""
    return {package: metadata.version(package).partition("+")[0] for package in ("transformers", "torch")}


class Matrix:
    """Runs families, each in a pool of ranks that is thrown away after a failure.

    Args:
        outcomes: the file that keeps them.
    """

    def __init__(self, outcomes: Path) -> None:
        self._file = outcomes
        lines = outcomes.read_text().splitlines() if outcomes.exists() else []
        self._known = {self._key(json.loads(line)) for line in lines}
        self._pool: RankPool | None = None

    def run(self, chosen: Sequence[Family], modes: Sequence[str], until: float) -> bool:
        """Fill in what is absent; whether all of it is there."""
        with tempfile.TemporaryDirectory() as folder:
            for family in chosen:
                todo = [mode for mode in modes if not self.knows(family, mode) and not self.knows(family, ALONE, False)]
                if not todo:
                    continue
                if time.monotonic() > until:
                    return False
                self._family(family, todo, str(Path(folder) / "alone.pt"))
        return True

    def knows(self, family: Family, mode: str, *ok: bool) -> bool:
        """Return whether there is an outcome; with ``ok``, one of that kind."""
        return any((*family, mode, known, *versions().values()) in self._known for known in ok or (True, False))

    def close(self) -> None:
        """End the ranks."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _family(self, family: Family, modes: Sequence[str], file: str) -> None:
        try:
            self._ranks().run(note_alone, 1, family, file, init=False, timeout=DEADLINE)
        except RankFailed as error:
            self.close()
            self._note(family, ALONE, False, reason=_reason(error))
            return
        if not self.knows(family, ALONE):
            self._note(family, ALONE, True)
        for mode in modes:
            size, config = MODES[mode]
            try:
                found: list[Distance] = self._ranks().run(distance, size, family, file, config=config, timeout=DEADLINE)
            except RankFailed as error:
                self.close()
                self._note(family, mode, False, reason=_reason(error))
                continue
            worst = max(found, key=lambda one: (not one.is_equal, one.loss, one.gradient))
            self._note(family, mode, worst.is_equal, **asdict(worst))

    def _ranks(self) -> RankPool:
        if self._pool is None:
            self._pool = RankPool(max(size for size, _ in MODES.values()))
        return self._pool

    def _note(self, family: Family, mode: str, ok: bool, **more: Any) -> None:
        record = {
            "kind": family.kind,
            "family": family.model_type,
            "mode": mode,
            "ok": ok,
            "versions": versions(),
            **more,
        }
        self._known.add(self._key(record))
        with self._file.open("a") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        print("equal" if ok else "NOT  ", family, mode, more.get("reason", ""), flush=True)

    @staticmethod
    def _key(record: dict[str, Any]) -> tuple[Any, ...]:
        return (*(record[name] for name in ("kind", "family", "mode", "ok")), *record["versions"].values())


def _reason(error: RankFailed) -> str:
    """Return the error of the rank that failed first, without its traceback."""
    lines = [line for line in str(error).strip().splitlines() if line and not line.startswith((" ", "Traceback"))]
    return (lines[-1] if len(lines) > 1 else lines[0])[:300]


def _chosen(names: Sequence[str]) -> Iterator[Family]:
    for family in families():
        if not names or family.model_type in names:
            yield family


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("outcomes", type=Path)
    run.add_argument("--modes", nargs="*", choices=list(MODES), default=list(MODES))
    run.add_argument("--families", nargs="*", default=[], metavar="MODEL_TYPE")
    run.add_argument("--seconds", type=float, default=float("inf"), help="begin no other family after that time")
    write = commands.add_parser("write")
    write.add_argument("outcomes", type=Path, nargs="*")
    options = parser.parse_args()
    if options.command == "write":
        from model_table import write_table

        write_table(options.outcomes)
        return
    matrix = Matrix(options.outcomes)
    try:
        complete = matrix.run(list(_chosen(options.families)), options.modes, time.monotonic() + options.seconds)
    finally:
        matrix.close()
    if not complete:
        print("not complete yet: run it again")


if __name__ == "__main__":
    main()
