"""Advice: said where it applies, and only there."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.platform.cloud import Cloud, service
from support.platform.jobs import model_parallel


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with service() as boto:
        made = Cloud(boto)
        for region in ("eu-west-1", "us-east-1"):
            configuration = (
                {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
            )
            boto.client("s3", region_name=region).create_bucket(Bucket=f"data-{region}", **configuration)
        yield made


SMALL = {"num_layers": 12, "hidden_width": 768}
LARGE = {"num_layers": 48, "hidden_width": 8192}
RESNET = "import torchvision\nmodel = torchvision.models.resnet50()\n"

#: name → (arguments, script, inputs, what is said, or None for nothing)
CASES: dict[str, tuple[dict[str, Any], str, Any, str | None]] = {
    "a model that fits one GPU": (
        {"distribution": model_parallel(8, partitions=8, ddp=True), "hyperparameters": SMALL},
        "",
        None,
        r"seems to fit one GPU: 12 layers of width 768 are about 0\.12 billion.*1\.8 GiB.*has 40 GiB.*without pipeline_par",
    ),
    "a model that does not": (
        {"distribution": model_parallel(8, partitions=8, ddp=True), "hyperparameters": LARGE},
        "",
        None,
        None,
    ),
    "data parallel already": ({"distribution": model_parallel(8, ddp=True), "hyperparameters": SMALL}, "", None, None),
    "unknown size": ({"distribution": model_parallel(8, partitions=2, ddp=True)}, "", None, None),
    "batch normalisation, small batch": (
        {"distribution": model_parallel(8, ddp=True, microbatches=4), "hyperparameters": {"batch_size": 32}},
        RESNET,
        None,
        r"train\.py \(resnet50\) uses batch normalisation.*over 8 samples only \(batch_size 32 ÷ microbatches 4\)",
    ),
    "batch normalisation in comments and other files": (
        {"distribution": model_parallel(8, ddp=True, microbatches=4), "hyperparameters": {"batch_size": 32}},
        "from torch import nn\nimport used\n# no BatchNorm2d here\nnorm = nn.LayerNorm(8)\nprint('BatchNorm2d')\n",
        None,
        None,
    ),
    "batch normalisation in an imported file": (
        {"distribution": model_parallel(8, ddp=True, microbatches=4), "hyperparameters": {"batch_size": 32}},
        "from parts import blocks\n",
        None,
        r"norms\.py \(BatchNorm2d\) uses batch normalisation",
    ),
    "batch normalisation over the replicas": (
        {"distribution": model_parallel(8, ddp=True, microbatches=4), "hyperparameters": {"batch_size": 32}},
        "from parts import blocks\nfrom torch import nn\nmodel = nn.SyncBatchNorm.convert_sync_batchnorm(blocks.Net())\n",
        None,
        None,
    ),
    "batch normalisation, large batch": (
        {"distribution": model_parallel(8, ddp=True), "hyperparameters": {"batch_size": 64}},
        RESNET,
        None,
        None,
    ),
    "small batch without batch normalisation": (
        {"distribution": model_parallel(8, ddp=True), "hyperparameters": {"batch_size": 2}},
        "LayerNorm",
        None,
        None,
    ),
    "batch normalisation, unknown batch": (
        {"distribution": model_parallel(8, ddp=True)},
        "nn.BatchNorm2d(3)",
        None,
        None,
    ),
    "several small instances": (
        {"distribution": model_parallel(4, ddp=True), "instance_type": "ml.p3.8xlarge"},
        "",
        None,
        r"2 × ml\.p3\.8xlarge \(4 GPUs each, 8 in all\).*1 × ml\.p3\.16xlarge has 8 GPUs",
    ),
    "several of the largest": ({"distribution": model_parallel(8, ddp=True)}, "", None, None),
    "one small instance": (
        {"distribution": model_parallel(4, ddp=True), "instance_type": "ml.p3.8xlarge", "instance_count": 1},
        "",
        None,
        None,
    ),
    "data elsewhere": (
        {"distribution": model_parallel(8, ddp=True)},
        "",
        {"train": "s3://data-eu-west-1/train", "eval": "s3://data-us-east-1/eval", "gone": "s3://no-such-bucket-here"},
        r"channel 'train' \(s3://data-eu-west-1/train\) lies in eu-west-1, and the job runs in us-east-1",
    ),
    "data here": ({"distribution": model_parallel(8, ddp=True)}, "", "s3://data-us-east-1/train", None),
    "another strategy": (
        {"distribution": {"mpi": {"enabled": True}}, "instance_type": "ml.p3.8xlarge", "hyperparameters": SMALL},
        RESNET,
        "s3://data-eu-west-1/train",
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_advice(name: str, cloud: Cloud, script: Path, caplog: pytest.LogCaptureFixture) -> None:
    arguments, code, inputs, expected = CASES[name]
    (script / "train.py").write_text(code)
    (script / "used.py").write_text("x = 1\n")
    (script / "other.py").write_text("from torch import nn\nmodel = nn.BatchNorm2d(3)\n")
    (script / "parts").mkdir()
    (script / "parts" / "blocks.py").write_text("from .norms import norm\n")
    (script / "parts" / "norms.py").write_text("from torch import nn\nnorm = nn.BatchNorm2d(3)\n")
    with caplog.at_level(logging.WARNING):
        job = cloud.estimator(script, **arguments)
        for _ in range(2):
            job.fit(inputs, wait=False)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("smp_")]
    if expected is None:
        assert said == []
    else:
        assert len(said) == 1, said
        assert re.search(expected, said[0]), said[0]
