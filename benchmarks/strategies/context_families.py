"""Every language model of Transformers on two ranks that share sequences out, against one process: equal or not, and what gathers.

    python benchmarks/strategies/context_families.py                     # all entries of the three mappings
    python benchmarks/strategies/context_families.py --families mamba t5 --file outcomes.jsonl

Models are those of ``benchmarks/models.py``: tiny, with 2 samples of 48 tokens, in float32. The ranks are threads of one process.
A family is *equal* if its loss is within 1e-5 of one process's, and its gradients within 1e-4. It *gathers nothing* if no
operation needed a whole sequence. Keys and values of attention that a model writes out as products do not count. The last lines
count families, and name the operations that gather.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "container"), str(ROOT)]

import torch
from support.models.tiny_families import SPECIAL, Family, NotBuilt, families, loss_of, tiny_model
from support.ranks.context_threads import cut, run_context

from smp_runtime.context import functions, packed_masks
from smp_runtime.context.proofs.position_wise import prepare
from smp_runtime.context.rules import flexible
from smp_runtime.context.sequence import ShardedSequence

SAMPLES, TOKENS = 2, 48
LOSS, GRADIENT = 1e-5, 1e-4
#: Products that gather keys or values, as an all-gather of attention does.
_OF_ATTENTION = {"matmul", "few"}
#: A slice of so many positions is not a whole sequence.
_FEW = 8


def _noting_callers() -> None:
    """Let each gather have the function of the model that caused it in its name."""
    original = ShardedSequence.whole

    def whole(self: ShardedSequence, why: str) -> torch.Tensor:
        if self.sequence_layout.length < _FEW:  # a few positions, as the state of a convolution
            return original(self, "few positions")
        frames = [frame for frame in traceback.extract_stack() if "/transformers/" in frame.filename]
        caller = f" in {Path(frames[-1].filename).stem}.{frames[-1].name}:{frames[-1].lineno}" if frames else ""
        return original(self, why + caller)

    ShardedSequence.whole = whole  # type: ignore[method-assign]


def compare(family: Family) -> dict[str, Any]:
    """Train one step in one process and on two ranks; return how far apart they are, and what was gathered."""
    model = tiny_model(family).float()
    copies = [copy.deepcopy(model) for _ in range(2)]  # before it is called: some keep states
    ids = torch.randint(6, SPECIAL, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(7))
    try:
        loss = loss_of(model, ids)
    except Exception:  # a table of positions for shorter samples only
        ids = ids[:, :16].contiguous()
        loss = loss_of(model, ids)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()

    def rank(group: Any) -> Any:
        mine = copies[group.rank]
        prepare(mine.modules())
        shared = loss_of(mine, cut(ids, group))
        shared = shared.whole("loss") if isinstance(shared, ShardedSequence) else shared
        shared.backward()
        found = {name: parameter.grad for name, parameter in mine.named_parameters()}
        return float(shared), found, group.gathered, group.received

    everyone = run_context(2, rank)
    most = max(float(each.abs().max()) for each in gradients.values() if each is not None)
    worst = (0.0, "")
    for name, gradient in gradients.items():
        theirs = [found[name] for _, found, _, _ in everyone]
        if gradient is None and all(each is None for each in theirs):
            continue
        empty = torch.zeros_like(model.get_parameter(name))
        mean = sum(empty if each is None else each for each in theirs) / 2
        wanted = empty if gradient is None else gradient
        worst = max(worst, (float((mean - wanted).abs().max()) / max(float(wanted.abs().max()), most / 100), name))
    off = max(abs(theirs - float(loss)) / max(1.0, abs(float(loss))) for theirs, *_ in everyone)
    return {
        "tokens": ids.shape[1],
        "loss": off,
        "gradient": worst[0],
        "where": worst[1],
        "equal": off <= LOSS and worst[0] <= GRADIENT,
        "gathered": dict(everyone[0][2]),
        "received": everyone[0][3],
    }


def gathers(outcome: dict[str, Any]) -> list[str]:
    """Return the names of what a family gathers besides keys and values."""
    return sorted(name for name in outcome["gathered"] if name.partition(" ")[0] not in _OF_ATTENTION)


def _report(outcomes: dict[str, dict[str, Any]]) -> None:
    ran = {name: each for name, each in outcomes.items() if "error" not in each}
    equal = {name: each for name, each in ran.items() if each["equal"]}
    quiet = [name for name, each in equal.items() if not gathers(each)]
    print(
        f"{len(outcomes)} entries that one process trains; {len(ran)} ran, {len(equal)} equal ({len(equal) / len(outcomes):.1%})"
    )
    print(f"of these {len(quiet)} gather nothing ({len(quiet) / max(1, len(equal)):.1%})")
    for name, each in outcomes.items():
        if "error" in each:
            print("ERROR", name, each["error"])
        elif not each["equal"]:
            print(f"NOT EQUAL {name}: loss {each['loss']:.1e}, gradient of {each['where']} {each['gradient']:.1e}")
    by_operation: dict[str, set[str]] = collections.defaultdict(set)
    for name, each in equal.items():
        for what in gathers(each):
            by_operation[what.partition(" ")[0]].add(name)
    for operation, names in sorted(by_operation.items(), key=lambda item: -len(item[1])):
        print(f"{operation}: {len(names)}: {', '.join(sorted(names))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=[], metavar="MODEL_TYPE")
    parser.add_argument("--file", type=Path, help="append outcomes here, and skip those that it has")
    options = parser.parse_args()
    torch.set_num_threads(1)
    functions.install()
    flexible.install()
    packed_masks.install()
    _noting_callers()
    known = options.file.read_text().splitlines() if options.file and options.file.exists() else []
    outcomes: dict[str, dict[str, Any]] = {line["name"]: line["outcome"] for line in map(json.loads, known)}
    for family in families():
        if str(family) in outcomes or (options.families and family.model_type not in options.families):
            continue
        began = time.monotonic()
        try:
            outcome = compare(family)
        except NotBuilt:
            outcome = {"absent": True}
        except Exception as error:
            outcome = {
                "error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:300] if str(error) else ''}"
            }
        outcomes[str(family)] = outcome
        print(family, f"{time.monotonic() - began:.1f}", "equal" if outcome.get("equal") else outcome, flush=True)
        if options.file:
            with options.file.open("a") as file:
                file.write(json.dumps({"name": str(family), "outcome": outcome}) + "\n")
    _report({name: each for name, each in outcomes.items() if "absent" not in each})


if __name__ == "__main__":
    main()
