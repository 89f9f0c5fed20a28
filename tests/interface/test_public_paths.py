"""Paths that notebooks, scripts and pages of earlier releases import stay."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PATHS = {
    "smp_config": "ConfigError Coordinates DataParallelSettings Group JobSettings ModelParallelParameters MpiSettings Topology",
    "smp_config.errors": "ConfigError",
    "smp_emulation.checked": "emulated install report uninstall StreamFault",
    "smp_emulation.installing": "install",
    "smp_estimator": "MPI ConfigError ModelParallel ProcessSession SMPEstimator SMPHuggingFace __version__",
    "smp_estimator.figures.partition": "read_partition",
    "smp_estimator.local.session": "ProcessSession",
    "smp_estimator.pictures.partition": "read_partition",
    "smp_estimator.planning": "ModelShape Plan Suggestion Verdict batches instance instances plan suggest",
    "smp_estimator.rehearsal": "rehearse",
    "smp_estimator.timeline": "JobTimeline RankStep Step read_timeline",
    "smp_runtime.checkpoint.files.manifest": "read_manifest",
    "smp_runtime.checkpoint.files.reader": "CheckpointReader",
    "smdistributed.dataparallel.torch.torch_smddp": "",
    "smdistributed.dataparallel.torch.distributed": "init_process_group get_rank",
    "smdistributed.modelparallel": "__version__",
    "smdistributed.modelparallel.torch": "DistributedModel DistributedOptimizer init step",
    "smdistributed.modelparallel.torch.nn": "DistributedLinear",
    "smdistributed.modelparallel.torch.nn.huggingface.gpt2": "",
}


@pytest.mark.parametrize("module", PATHS)
def test_a_path_of_earlier_releases(module):
    loaded = importlib.import_module(module)
    for name in PATHS[module].split():
        assert hasattr(loaded, name), name


@pytest.mark.parametrize("program", ["smp_launch", "smp_estimator.cli", "smp_emulation"])
def test_a_program_of_earlier_releases(program):
    done = subprocess.run([sys.executable, "-m", program, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout
