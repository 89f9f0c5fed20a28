"""Stands in for ``python -m smp_launch train``: does what the hyperparameter ``play`` says, without mpirun.

Run as a program by jobs of these tests; imports nothing of the project.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

base = Path(os.environ["SAGEMAKER_BASE_DIR"])
host = os.environ["CURRENT_HOST"]
hyperparameters = {
    name: json.loads(value)
    for name, value in json.loads((base / "input/config/hyperparameters.json").read_text()).items()
}
resources = json.loads((base / "input/config/resourceconfig.json").read_text())
play = hyperparameters.get("play", "train")
leader = resources["hosts"][0] == host


def lifeline() -> None:
    while os.read(0, 64):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def progress(step: int, total: int) -> None:
    record = {"step": step, "total_steps": total, "loss": 3.0 / step, "samples_per_second": 12.5, "memory_bytes": 2**30}
    print("smp-progress " + json.dumps(record), flush=True)


def rank(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


threading.Thread(target=lifeline, daemon=True).start()
print(f"hello from {host}", flush=True)

if play == "train":
    steps = int(hyperparameters.get("steps", 3))
    for step in range(1, steps + 1):
        if leader:
            progress(step, steps)
            print(f"log line {step}", flush=True)
        time.sleep(float(hyperparameters.get("pause", 0)))
    (base / "model" / f"weights-{host}.txt").write_text("weights")
    (base / "model" / "shared.txt").write_text("same")
    if hyperparameters.get("write_output"):
        (base / "output/data" / "curve.csv").write_text("step,loss")
    if hyperparameters.get("write_checkpoint"):
        (base / "checkpoints" / f"step-{host}.txt").write_text("checkpoint")
    report = {
        "environment": dict(os.environ),
        "code": sorted(str(p.relative_to(base / "code")) for p in (base / "code").rglob("*") if p.is_file()),
        "channels": {c.name: sorted(f.name for f in c.iterdir()) for c in (base / "input/data").iterdir()},
        "hyperparameters": hyperparameters,
        "resources": resources,
        "inputs": json.loads((base / "input/config/inputdataconfig.json").read_text()),
    }
    (base / "model" / f"report-{host}.json").write_text(json.dumps(report))
elif play == "fail":
    if hyperparameters.get("write_output"):
        (base / "output/data" / f"curve-{host}.csv").write_text("step,loss")
    if leader:
        (base / "output/failure").write_text(
            "rank 1 (algo-1): ValueError: boom\nTraceback (most recent call last):\n  step 3\nValueError: boom"
        )
        sys.exit(1)
    time.sleep(600)
elif play == "die":
    print("Segmentation fault", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
elif play == "hang":
    # A rank in a session of its own that ignores SIGTERM, with a child of its own.
    inner = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = rank(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}]); {inner}")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if hyperparameters.get("stubborn") else signal.SIG_DFL)
    progress(1, 100)
    print("hanging", flush=True)
    time.sleep(600)
elif play == "obey":

    def stop(*_: object) -> None:
        (base / "model" / "saved.txt").write_text("saved on SIGTERM")
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    print("waiting", flush=True)
    time.sleep(600)
elif play.startswith("flood"):
    if "ignore" in play:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    number = 0
    while True:
        number += 1
        print(f"flood line {number} " + "x" * 2000, flush=True)
