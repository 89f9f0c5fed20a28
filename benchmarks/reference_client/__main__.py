"""Train the reference client of version 2 at several degrees, and compare the runs.

    git clone --filter=blob:none https://github.com/aws/amazon-sagemaker-examples && cd amazon-sagemaker-examples
    git checkout 2d519b52c
    python benchmarks/reference_client "…/sm-distributed_model_parallel_v2/shared-scripts" --out DIR

Its Python needs transformers and datasets beside this project; ``make test-clients`` makes such environments. A job is processes of
this machine that play GPUs; nothing is downloaded. A pair is equal if every loss is within its tolerance. The weights of the final
models, which ``from_pretrained`` loads, are compared too. The table goes to DIR/pairs.md, outputs of the jobs lie beside it. Jobs
that are there already are not run again. ``--only WORDS`` chooses pairs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from reference_client.cases import MODELS, SHARED, TOPOLOGIES, Case, list_cases

ROOT = Path(__file__).resolve().parents[2]

_LOSS = re.compile(r"Batch (\d+) Loss: ([-+.\w]+)")

#: Updates after which a job that is resumed has written its checkpoint.
_SAVED_AFTER = 3


class Client:
    """Folders of the client and of the results."""

    def __init__(self, scripts: Path, out: Path, limit: float) -> None:
        self.scripts, self.out, self.limit = scripts, out, limit
        self.data = out / "data"
        if not self.data.exists():
            write_data(self.data)

    def run(self, model: str, topology: str, more: dict[str, Any]) -> Path:
        """Run a job unless it has run, and return its folder.

        Raises:
            RuntimeError: it failed; its output is in the folder.
        """
        processes, parameters = TOPOLOGIES[topology]
        given = {**SHARED, **MODELS[model], **more}
        key = hashlib.sha256(json.dumps([given, topology], sort_keys=True, default=str).encode()).hexdigest()[:8]
        folder = self.out / f"{model}-{topology}-{key}".replace(" ", "_").replace(",", "")
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            given = {"checkpoint_dir": folder / "checkpoints", "model_dir": folder / "model", **given}
            self._start(folder, processes, parameters, given)
        return folder

    def _start(self, folder: Path, processes: int, parameters: dict[str, Any], given: dict[str, Any]) -> None:
        words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
        data = ["--training_dir", str(self.data), "--test_dir", str(self.data)]
        client = Path(__file__).with_name("client.py")
        command = [sys.executable, "-m", "smp_launch", "run", "--processes", str(processes)]
        command += ["--parameters", json.dumps(parameters), str(client), *words, *data]
        paths = [str(ROOT / "container"), str(ROOT)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "SMP_EMULATE_CUDA": "1",
            "HF_HUB_OFFLINE": "1",
        }
        environment["OMP_NUM_THREADS"] = "1"
        environment["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = (
            "1"  # the script loads local checkpoints as before PyTorch 2.6
        )
        try:
            with open(folder / "log.txt", "w") as log:
                ended = subprocess.run(
                    command, cwd=self.scripts, env=environment, stdout=log, stderr=log, timeout=self.limit
                ).returncode
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no end within {self.limit:.0f} s: {folder / 'log.txt'}") from None
        if ended:
            raise RuntimeError(f"exit status {ended}: {folder / 'log.txt'}")
        (folder / "done").touch()

    def compare(self, case: Case) -> tuple[float, float]:
        """Return how far a pair is apart: the largest relative difference of a loss, and the largest of a weight."""
        if case.resumed:
            return self._compare_resumed(case)
        found = self.run(case.model, case.topology, case.more)
        assert case.reference is not None
        more, topology = case.reference
        wanted = self.run(case.model, topology, more)
        return _apart(_losses(found), _losses(wanted)), _weights_apart(found, wanted)

    def _compare_resumed(self, case: Case) -> tuple[float, float]:
        kind = {"checkpoint_type": case.resumed}
        whole = self.run(case.model, case.topology, {**case.more, **kind, "checkpoint_freq": _SAVED_AFTER})
        (saved,) = (whole / "checkpoints").glob(f"*-{_SAVED_AFTER}steps")
        again = self.run(case.model, case.topology, {**case.more, **kind, "resume_from_checkpoint": saved})
        wanted, found = _losses(whole), _losses(again)
        assert sorted(found) == list(range(_SAVED_AFTER, int(SHARED["max_steps"]))), (
            "it began where the other had saved"
        )
        return _apart(found, {step: wanted[step] for step in found}), _weights_apart(again, whole)


def write_data(folder: Path) -> None:
    folder.mkdir(parents=True)
    drawn = random.Random(7)
    with open(folder / "tokens.json", "w") as file:
        for _ in range(256):
            tokens = [drawn.randrange(128) for _ in range(32)]
            file.write(json.dumps({"input_ids": tokens, "attention_mask": [1] * 32}) + "\n")


def _losses(folder: Path) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in _LOSS.findall((folder / "log.txt").read_text())}


def _apart(found: dict[int, float], wanted: dict[int, float]) -> float:
    if sorted(found) != sorted(wanted) or not found:
        raise RuntimeError(f"the steps {sorted(found)} are not {sorted(wanted)}")
    return max(abs(found[step] - wanted[step]) / abs(wanted[step]) for step in found)


def _weights_apart(found: Path, wanted: Path) -> float:
    """Return the largest difference of two final models that ``from_pretrained`` loads."""
    from transformers import AutoModelForCausalLM

    states = []
    for folder in (found, wanted):
        model, report = AutoModelForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
        if report["missing_keys"] or report["unexpected_keys"]:
            raise RuntimeError(f"from_pretrained: {report}")
        states.append(model.state_dict())
    assert states[0].keys() == states[1].keys()
    return max(float((states[0][name].double() - value.double()).abs().max()) for name, value in states[1].items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path, help="the folder with train.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="words that the name of a pair contains")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a job")
    given = parser.parse_args()
    client = Client(given.scripts.resolve(), given.out.resolve(), given.limit)
    rows = []
    for case in list_cases():
        if given.only not in case.name:
            continue
        begin, verdict, losses, weights = time.monotonic(), "", float("nan"), float("nan")
        try:
            losses, weights = client.compare(case)
            verdict = "equal" if losses <= case.tolerance else "DIFFERENT"
        except (RuntimeError, OSError, ValueError, AssertionError) as error:
            verdict = f"FAILED: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        rows.append(f"| {case.name} | {case.tolerance:.0e} | {losses:.1e} | {weights:.1e} | {verdict} |")
        print(rows[-1], f"{time.monotonic() - begin:.0f} s", flush=True)
    head = ["| pair | tolerance | losses apart (relative) | weights apart | |", "|---|---|---|---|---|"]
    (client.out / "pairs.md").write_text("\n".join([*head, *rows]) + "\n")
    return int(not rows or any("| equal |" not in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
