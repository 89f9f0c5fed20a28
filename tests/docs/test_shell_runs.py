"""Every command in README and ``docs/`` runs: here, in another test, or there is a reason why it does not.

The lines of a block run one after the other in one shell, in a folder with what the page presupposes. They take seconds each, so
that ``make test`` only looks whether each of them is run or listed; commands of the planner run there in ``test_examples_run.py``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.documents.doc_blocks import ROOT, Block, all_blocks
from support.documents.doc_runs import Key, key_of, matching

LAUNCHERS = "tests/jobs/test_launchers.py"
START_RUNS = "tests/docs/test_examples_run.py"

#: Lines that another file of tests runs, and words of that file.
ELSEWHERE: dict[Key, tuple[str, str]] = {
    ("choose.md", "smp-estimator suggest"): (START_RUNS, "CHOOSE"),
    ("choose.md", "smp-estimator plan"): (START_RUNS, "CHOOSE"),
    ("launchers.md", "--hosts 2 --host-rank 0"): (LAUNCHERS, "--host-rank"),
    ("launchers.md", "--hosts 2 --host-rank 1"): (LAUNCHERS, "--host-rank"),
    ("launchers.md", "export SM_HP_MP_PARAMETERS"): (LAUNCHERS, "SM_HP_MP_PARAMETERS"),
    ("launchers.md", "torchrun --nnodes"): (LAUNCHERS, "torchrun"),
    ("launchers.md", "printf"): (LAUNCHERS, "--hostfile"),
    ("launchers.md", "--bind-to none smp-launch run"): (LAUNCHERS, "--hostfile"),
    ("launchers.md", "-x SM_HP_MP_PARAMETERS"): (LAUNCHERS, "SM_HP_MP_PARAMETERS"),
    ("launchers.md", 'smp-launch run --processes 2 --parameters "$MP"'): (LAUNCHERS, "srun"),
    ("launchers.md", "srun --kill-on-bad-exit"): (LAUNCHERS, "srun"),
    ("checked-streams.md", "SMP_EMULATE_CUDA_DEVICES=1"): (
        "tests/emulation/test_shared_devices.py",
        "SMP_EMULATE_CUDA_DEVICES",
    ),
    ("launchers.md", "smp-estimator manifest"): ("tests/estimator/test_hyperpod.py", "smp_estimator.cli.manifest"),
    ("lora.md", "examples/lora.py"): ("tests/clients/test_trl.py", "lora.py"),
    ("start.md", "smp-estimator run train.py"): (START_RUNS, "START"),
    ("start.md", "smp-estimator checkpoint inspect"): (START_RUNS, "START"),
    ("start.md", "smp-estimator checkpoint convert"): (START_RUNS, "START"),
    ("start.md", "smp-estimator run finetune.py"): (START_RUNS, "START"),
    ("start.md", "mkdir exported"): (START_RUNS, "START"),
}
INDEX = "it installs from a package index"
STEP = "a step of its own in .ci/run"
GPU = "it needs a GPU, and makes no difference without; tests/runtime/test_devices.py"
BENCH = "it measures for minutes; tests/docs/test_figures.py tests the runner"
WHEEL = "it needs the tools that build the wheel; tests/estimator/test_wheel.py builds one and looks into it"
CLUSTER = "it asks a cluster of Kubernetes; tests/estimator/test_hyperpod.py checks the manifest"
ACCOUNT = "it asks an account of AWS; tests/estimator/test_doctor.py has a stand-in of one"
DOCKER = "it builds and runs images with Docker: `make test-docker`, a step of its own in .ci/run"
#: Lines that nothing runs.
NOT_RUN: dict[Key, str] = {
    ("README.md", "python3 -m venv"): INDEX,
    ("README.md", "make quickstart"): STEP,
    ("README.md", "make test "): STEP,
    ("README.md", "make dist"): WHEEL,
    ("README.md", "pip install torch"): INDEX,
    ("README.md", 'pip install "dist/'): INDEX,
    ("start.md", "make dist"): WHEEL,
    ("start.md", "python3 -m venv"): INDEX,
    ("start.md", "pip install torch"): INDEX,
    ("start.md", 'pip install "dist/'): INDEX,
    ("lora.md", "pip install"): INDEX,
    ("launchers.md", "SMP_SHARED_GPU=nccl"): GPU,
    ("launchers.md", "kubectl create"): CLUSTER,
    ("launchers.md", "kubectl apply"): CLUSTER,
    ("how-it-works/launchers.md", "pip download"): INDEX,
    ("how-it-works/launchers.md", "pip install --no-index"): INDEX,
    ("how-it-works/launchers.md", "export PYTHONPATH="): INDEX,
    ("sdk-v3.md", "pip install"): INDEX,
    ("cloud.md", "smp-estimator doctor"): ACCOUNT,
    ("image.md", "make image  "): DOCKER,
    ("image.md", "make image BASE_IMAGE"): DOCKER,
    ("image.md", "make test-docker"): DOCKER,
    ("image.md", "make push"): DOCKER,
    ("performance.md", "make bench-quick"): BENCH,
    ("performance.md", "make bench "): BENCH,
    (
        "performance.md",
        "benchmarks/gpu_check",
    ): "it needs a GPU; tests/docs/test_gpu_check.py runs one check on the CPU",
}
LISTED = [*ELSEWHERE, *NOT_RUN]


def lines(block: Block) -> list[str]:
    """The commands of a block, each with the lines that it is continued on."""
    return [line for line in re.split(r"(?<!\\)\n", block.code) if line.strip() and not line.startswith("#")]


def line_key(block: Block, line: str) -> Key | None:
    return key_of(Block(block.document, block.line, "sh", line), LISTED)


def left(block: Block) -> list[str]:
    """The lines that run here."""
    return [line for line in lines(block) if line_key(block, line) is None]


HERE = [block for block in all_blocks("sh") if left(block)]


# -- scenes --------------------------------------------------------------------------------------------------


@dataclass
class Scene:
    """What lies in the folder of a block, and what stands for words of the reader."""

    files: Callable[[], None] = lambda: None
    instead: dict[str, str] = field(default_factory=dict)
    job: bool = False


def _script(*words: str) -> Callable[[], None]:
    """A ``train.py``: the block of a page with these words."""

    def written() -> None:
        (block,) = matching((words[0], words[1]), "python")
        Path("train.py").write_text(block.code)

    return written


def _plain(name: str) -> Callable[[], None]:
    """A ``train.py`` without this library, and the module that it imports."""

    def written() -> None:
        for source, target in ((name, "train"), ("common", "common")):
            text = (ROOT / "tests" / "support" / "scripts" / "plain" / f"{source}.py").read_text()
            Path(f"{target}.py").write_text(text)

    return written


def _of_rehearsals(name: str) -> Callable[[], None]:
    return lambda: Path("train.py").write_text((ROOT / "tests" / "rehearsal" / name).read_text()) and None


#: Layers of a width, which the command line says; its batches are those of a loader.
SIZED = """
import argparse
import torch
import smdistributed.modelparallel.torch as smp

words = argparse.ArgumentParser()
words.add_argument("--layers", type=int, default=2)
words.add_argument("--hidden", type=int, default=64)
words.add_argument("--batch-size", type=int, default=8)
words, _ = words.parse_known_args()
smp.init()


class Files(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return {"input_ids": torch.full((1024,), index % 100), "labels": torch.full((1024,), index % 100)}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(128, words.hidden)
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(words.hidden, words.hidden) for _ in range(words.layers)])

    def forward(self, ids):
        return self.layers(self.embedding(ids)).float().mean()


model = smp.DistributedModel(Net())
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))


@smp.step
def train_step(model, ids):
    loss = model(ids)
    model.backward(loss)
    return loss


for number, batch in enumerate(torch.utils.data.DataLoader(Files(), batch_size=words.batch_size, drop_last=True)):
    optimizer.zero_grad()
    train_step(model, batch["input_ids"].to(smp.state.device))
    optimizer.step()
    if number == 3:
        break
"""
#: A job that goes on until a file says that it may end.
ENDLESS = """
import os
import time
import torch
import smdistributed.modelparallel.torch as smp

smp.init()
model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@smp.step
def train_step(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss


while not any(smp.allgather(os.path.exists(os.environ["STOP"]), smp.WORLD)):
    train_step(model, torch.randn(8, 8))
    optimizer.step()
    time.sleep(0.02)
"""


def _sized() -> None:
    Path("train.py").write_text(SIZED)


def _checkpoint() -> None:
    Path("train.py").write_text(
        "import smdistributed.modelparallel.torch as smp, torch\nfrom transformers import GPT2Config, GPT2LMHeadModel\n"
        "smp.init()\nmodel = smp.DistributedModel(GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2)))\n"
        "smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "smp.save_checkpoint('saved', tag='1')\n"
    )
    subprocess.run([sys.executable, "train.py"], check=True, timeout=100)


def _sharded_checkpoint() -> None:
    """A partial checkpoint of a job with sharded data parallelism."""
    Path("train.py").write_text(
        "import smdistributed.modelparallel.torch as smp, torch\nfrom torch import nn\n"
        "smp.init()\nmodel = smp.DistributedModel(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))\n"
        "optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))\n"
        f"smp.save_checkpoint({str(Path.cwd() / 'checkpoints')!r}, tag='100', partial=True, model=model, optimizer=optimizer)\n"
    )
    command = ["smp-estimator", "run", "train.py", "--processes", "2"]
    command += ["--parameters", '{"sharded_data_parallel_degree": 2, "ddp": true}']
    subprocess.run(command, check=True, timeout=150)


def _distribution() -> None:
    """A distribution as a notebook has it."""
    strategies = {"modelparallel": {"enabled": True, "parameters": {"partitions": 2, "microbatches": 4, "ddp": True}}}
    whole = {"smdistributed": strategies, "mpi": {"enabled": True, "processes_per_host": 8}}
    Path("distribution.json").write_text(json.dumps(whole))


def _notebook() -> None:
    """A notebook for version 2 of the SDK, and its distribution in a file."""
    _distribution()
    code = (
        "from smp_estimator import SMPEstimator\n\n"
        "estimator = SMPEstimator(\n    entry_point='train.py', instance_type='local',\n"
        "    distribution={'smdistributed': {'modelparallel': {'enabled': True}}, 'mpi': {'enabled': True}},\n)\n"
        "estimator.fit()\n"
    )
    cell = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": code}
    Path("notebook.ipynb").write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))


def _text() -> None:
    Path("text").mkdir()
    Path("text/some.txt").write_text("to be or not to be, that is the question. " * 400)
    Path("train_gpt.py").write_text((ROOT / "entrypoints" / "train_gpt.py").read_text())


def _output() -> None:
    """What a job has left, with a timeline and a profile."""
    Path("train.py").write_text(SIZED)
    command = ["smp-estimator", "run", "train.py", "--processes", "2", "--output", "out"]
    command += ["--env", "SMP_TIMELINE=10", "--env", "SMP_PROFILE=steps=2-3"]
    command += ["--parameters", '{"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": true}']
    subprocess.run(command, check=True, timeout=150)


_STEP_AND_JOB = {"JOB_OUTPUT": "out", "--step 7": "--step 2"}
SCENES: dict[Key, Scene] = {
    ("accelerate.md", "smp-estimator run"): Scene(_script("accelerate.md", "accelerator.prepare")),
    ("version-2.md", "smp-estimator run"): Scene(_script("version-2.md", "tsm.init()")),
    ("checkpoints.md", "checkpoint inspect"): Scene(_checkpoint, {"PATH": "saved", "OUT": "out"}),
    ("how-it-works/checkpoints.md", "--to flat_groups"): Scene(_sharded_checkpoint),
    ("command-line.md", "smp-estimator run"): Scene(_sized, {"DIR": "."}),
    ("estimator.md", "smp-estimator validate"): Scene(_distribution),
    ("generation.md", "examples/generate.py"): Scene(instead={"examples/": f"{ROOT}/examples/"}),
    ("context-parallelism.md", "examples/long_sequences.py"): Scene(instead={"examples/": f"{ROOT}/examples/"}),
    ("hangs.md", "smp-estimator where"): Scene(instead={"JOB --stacks": "{job} --stacks"}, job=True),
    ("launchers.md", "--steps 100"): Scene(_text, {"--steps 100": "--steps 3"}),
    ("migrate.md", "smp-estimator validate"): Scene(_distribution),
    ("migrate.md", "smp-estimator migrate"): Scene(_notebook),
    ("numerics.md", "smp-estimator verify"): Scene(_script("start.md", "config = LlamaConfig("), {"DIR": "."}),
    ("performance.md", "bench.py list"): Scene(instead={"benchmarks/": f"{ROOT}/benchmarks/"}),
    ("planning.md", "suggest --script"): Scene(_sized, {"--budget 600": "--budget 20"}),
    ("rehearsal.md", "--layers 44"): Scene(_sized),
    ("rehearsal.md", "--input-shape"): Scene(_sized),
    ("rehearsal.md", "--measured measured"): Scene(_sized, {"6144": "64"}),
    ("reshape.md", "smp-estimator reshape"): Scene(instead={"my-job": "{job}", 'degree": 4': 'degree": 2'}, job=True),
    ("sdk-v3.md", "smp-estimator migrate"): Scene(_notebook),
    ("security.md", "checkpoint verify"): Scene(_checkpoint, {"verify checkpoints": "verify saved"}),
    ("timeline.md", "smp-estimator timeline"): Scene(_output, _STEP_AND_JOB),
    ("tracking.md", "top JOB"): Scene(instead={"top JOB": "top {job} --once"}, job=True),
    ("tracking.md", "top gpt"): Scene(instead={"top gpt": "top {job} --once"}, job=True),
    ("tracking.md", "smp-estimator profile"): Scene(_output, {"JOB_OUTPUT": "out"}),
    ("verify-plain.md", "--data DIR"): Scene(_plain("right_ddp")),
    ("verify-plain.md", "--batches get_batch"): Scene(_plain("right_get_batch")),
}


#: Starts it; other jobs may run on this machine, so that this one is called by its name.
STARTED = """
import sys
from smp_estimator import MPI, ModelParallel, SMPEstimator

name, stop = sys.argv[1:]
estimator = SMPEstimator(
    entry_point="endless.py",
    instance_type="local",
    distribution=ModelParallel(pipeline_parallel_degree=2, microbatches=2, ddp=True) | MPI(processes_per_host=2),
    environment={"SMP_RESHAPE_REQUESTS": "1", "STOP": stop},
)
estimator.fit(job_name=name)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Starts a job of two ranks, which ends with the test; gives its name."""
    stop, started = tmp_path / "stop", []
    name = f"page-{os.getpid()}-{time.monotonic_ns()}"

    def start() -> str:
        Path("endless.py").write_text(ENDLESS)
        started.append(subprocess.Popen([sys.executable, "-c", STARTED, name, str(stop)]))
        begin = time.monotonic()
        while True:
            said = subprocess.run(["smp-estimator", "where", name], capture_output=True, text=True).stdout
            if len(re.findall(r"rank \d: step [1-9]", said)) == 2:
                return name
            assert time.monotonic() - begin < 300, said
            time.sleep(1)

    yield start
    stop.touch()
    for process in started:
        assert process.wait(120) == 0


# -- what is checked -----------------------------------------------------------------------------------------


def test_every_entry_means_something() -> None:
    for key in LISTED:
        meant = [line for block in matching(key, "sh") for line in lines(block) if key[1] in line]
        assert len(meant) == 1, f"{key} means {meant}"
    for key in SCENES:
        assert len(matching(key, "sh")) == 1, key
        assert left(matching(key, "sh")[0]), f"no line of {key} runs here"


@pytest.mark.parametrize("key", ELSEWHERE, ids=":".join)
def test_another_file_runs_it(key: Key) -> None:
    place, words = ELSEWHERE[key]
    assert words in (ROOT / place).read_text(encoding="utf-8")


@pytest.mark.full
@pytest.mark.job
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", HERE, ids=lambda block: block.name)
def test_commands_run(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Callable[[], str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    key = key_of(block, SCENES)
    scene = SCENES[key] if key else Scene()
    scene.files()
    name = job() if scene.job else ""
    code = "\n".join(left(block))
    for words, other in scene.instead.items():
        assert words in code
        code = code.replace(words, other.replace("{job}", name))
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", code], capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stdout + done.stderr
