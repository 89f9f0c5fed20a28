"""A GPU script through ``fit()`` on a machine without a GPU, and one that needs a kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.platform.jobs import model_parallel

pytestmark = pytest.mark.job

NEEDS_A_KERNEL = """
import torch
x = torch.ones(2, device="cuda")
from apex.optimizers import FusedAdam
"""


def _estimator(source, script, tmp_path, **arguments):
    from smp_estimator import SMPEstimator

    return SMPEstimator(
        entry_point=script,
        source_dir=str(source),
        instance_type="local",
        output_path=f"file://{tmp_path / 'out'}",
        **arguments,
    )


def test_a_gpu_script_trains(tmp_path, capfd):
    parameters = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}
    _estimator(Path(__file__).parent, "gpu_script.py", tmp_path, distribution=model_parallel(2, **parameters)).fit()
    log = capfd.readouterr().out
    assert log.count("no GPU here: calls of torch.cuda act on the CPU") == 1
    for rank in range(2):
        assert f"rank {rank} of 2 devices, on {rank}: ok" in log
    assert "needs a GPU" not in log


@pytest.mark.parametrize("value", ["1", pytest.param("0", marks=pytest.mark.full)])
def test_a_script_that_needs_a_kernel_says_so(tmp_path, capfd, value):
    from sagemaker.exceptions import UnexpectedStatusException

    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(NEEDS_A_KERNEL)
    with pytest.raises(UnexpectedStatusException) as raised:
        _estimator(tmp_path / "src", "train.py", tmp_path, environment={"SMP_EMULATE_CUDA": value}).fit()
    said = "No module named 'apex': this needs a GPU, or CUDA code; there is no GPU here"
    assert (said in str(raised.value)) == (value == "1")
    assert ("calls of torch.cuda act on the CPU" in capfd.readouterr().out) == (value == "1")
