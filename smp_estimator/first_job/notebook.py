"""``train.ipynb`` of a first job: the estimator's call, and the cells before and after it."""

from __future__ import annotations

import json
from typing import Any

from smp_estimator.first_job.answers import LOCAL, MODELS, STRATEGIES, Answers

_LOCAL_CALL = """\
from smp_estimator import MPI, ModelParallel, SMPEstimator

estimator = SMPEstimator(
    entry_point="train.py",
    instance_type="local",  # processes of this machine; a type such as "ml.p4d.24xlarge" is a cluster
    hyperparameters={{"epochs": 3, "batch_size": 32}},
{checkpoints}    distribution=ModelParallel({parameters}) | MPI(processes_per_host={processes}),
)
"""

_CLOUD_CALL = """\
from sagemaker import get_execution_role

from smp_estimator import MPI, ModelParallel, SMPEstimator

estimator = SMPEstimator(
    entry_point="train.py",
    role=get_execution_role(),
    instance_type="{instance_type}",
    instance_count=1,
    hyperparameters={{"epochs": 3, "batch_size": 32}},
{checkpoints}    distribution=ModelParallel({parameters}) | MPI(processes_per_host={processes}),
)
"""

_MODEL = """\
import tarfile

with tarfile.open(estimator.model_data.removeprefix("file://")) as archive:
    print(archive.getnames())
"""


def notebook(answers: Answers) -> str:
    """Return the text of ``train.ipynb``, in version 4 of the format."""
    local = answers.instance_type == LOCAL
    cells = [
        ("markdown", f"# Train {MODELS[answers.model]}\n\nWith {STRATEGIES[answers.strategy]}."),
        ("markdown", _before(local=local)),
        ("code", _call(answers)),
        ("markdown", "## Train\n\n`fit()` shows the progress and the log; the kernel's stop button stops the job."),
        ("code", "estimator.fit()"),
        ("markdown", "## The model"),
        ("code", _MODEL if local else "print(estimator.model_data)"),
    ]
    document = {
        "cells": [_cell(number, kind, text) for number, (kind, text) in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _before(*, local: bool) -> str:
    where = (
        "processes of this machine: no account, no Docker" if local else "a job of the service: each minute is paid for"
    )
    return (
        f"## The job\n\nIt runs as {where}. A mistake in its settings is an error here, before anything is started. "
        "`estimator.plan(model)` says whether a model fits, `estimator.suggest(model)` with which settings it would."
    )


def _call(answers: Answers) -> str:
    local = answers.instance_type == LOCAL
    folder = "f\"file://{Path.cwd() / 'checkpoints'}\"" if local else '"s3://BUCKET/checkpoints"'
    checkpoints = ""
    if answers.checkpoints:
        checkpoints = f"    checkpoint_s3_uri={folder},  # the next job goes on from there\n"
    template = _LOCAL_CALL if local else _CLOUD_CALL
    text = template.format(
        instance_type=answers.instance_type,
        parameters=", ".join(f"{name}={value!r}" for name, value in answers.parameters.items()),
        processes=answers.processes,
        checkpoints=checkpoints,
    )
    return f"from pathlib import Path\n\n{text}" if local and checkpoints else text


def _cell(number: int, kind: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {
        "cell_type": kind,
        "id": f"cell-{number}",
        "metadata": {},
        "source": text.rstrip().splitlines(keepends=True),
    }
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell
