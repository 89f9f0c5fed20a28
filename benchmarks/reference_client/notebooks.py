"""Run the cells of version 2's public notebooks with this package's estimator, against a stand-in of the service.

    python benchmarks/reference_client/notebooks.py "…/sm-distributed_model_parallel_v2"
    python benchmarks/reference_client/notebooks.py FOLDER --train sm-fsdp-ep_train_mixtral --out DIR

The first prints the requests of all notebooks, the second runs one job here, with a tiny model. Every code cell runs as it is.
Supplied: SMPEstimator under the name of the SDK's PyTorch; libraries that prepare data, which are not needed for a request;
identifiers that a notebook leaves for its user; and ``s3_output_bucket`` in one notebook whose cell is no valid Python. A job here
also gets :mod:`client`, folders of this machine, and instances ``"local"``. Needs the SDK's version 2 and moto.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks"), str(ROOT / "container"), str(ROOT)]

#: What a user fills in.
_FILLED = {
    "FILE_SYSTEM_ID": "fs-0123456789abcdef0",
    "FSX_SECURITY_GROUP_ID": "sg-1",
    "FSX_SUBNET": "subnet-1",
    "BASE_PATH": "/base",
    "training_dataset_location": "s3://bucket/train",
    "validation_dataset_location": "s3://bucket/test",
}

#: A model that a laptop trains.
_TINY = {
    "hidden_width": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "intermediate_size": 64,
    "vocab_size": 128,
    "max_context_width": 32,
    "max_steps": 3,
    "train_batch_size": 2,
    "zipped_data": 0,
    "checkpoint_freq": 100,
    "validation_freq": 100,
}


def run_cells(notebook: Path, before_estimator: Any = None) -> tuple[int, list[str]]:
    """Run a notebook's code cells, and return how many estimators were made and what other cells have failed with.

    Args:
        before_estimator: gets the names of the notebook before the cell that makes an estimator; then the first job is the last.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    made, failed = 0, []
    for number, cell in enumerate(json.loads(notebook.read_text())["cells"]):
        if cell["cell_type"] != "code":
            continue
        code = "".join(line for line in cell["source"] if not re.match(r"\s*[%!]", line))
        makes = "PyTorch(" in code
        if makes:
            names.setdefault("s3_output_bucket", "s3://bucket/out")
            if before_estimator is not None:
                before_estimator(names)
        try:
            # What a job on this machine prints is shown.
            shown = before_estimator is not None and ".fit(" in code
            with contextlib.nullcontext() if shown else contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, f"cell {number}", "exec"), names)
        except Exception as error:  # of a notebook; told below
            if makes or ".fit(" in code:
                raise
            failed.append(f"cell {number}: {type(error).__name__}")
        made += makes
        if before_estimator is not None and ".fit(" in code:
            break
        names.update({name: value for name, value in _FILLED.items() if name in names or "location" in name})
    return made, failed


@contextlib.contextmanager
def stand_ins(estimator: Any) -> Iterator[Any]:
    """Put stand-ins in place of the service, and of what prepares data; yield the service."""
    import boto3
    import sagemaker.pytorch
    from support.platform.cloud import ROLE, Cloud, service

    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    os.system = lambda _: 0  # type: ignore[assignment]
    for name in ("datasets", "transformers", "transformers.testing_utils"):
        sys.modules[name] = MagicMock()
    sagemaker.pytorch.PyTorch = estimator
    with service() as boto:
        boto3.client = boto.client
        boto3.session.Session = lambda *_, **__: boto
        sagemaker.session.Session.get_caller_identity_arn = lambda _: ROLE
        sagemaker.session.Session.logs_for_job = lambda *_, **__: None
        yield Cloud(boto)


def show_requests(folder: Path) -> int:
    """Run all notebooks, and print a row for each request."""
    from smp_estimator import SMPEstimator

    with stand_ins(SMPEstimator) as cloud:
        for notebook in sorted(folder.glob("*/*.ipynb")):
            os.chdir(notebook.parent)
            before = len(cloud.requests)
            made, failed = run_cells(notebook)
            for sent in cloud.requests[before:]:
                resources = sent["ResourceConfig"]
                image = sent["AlgorithmSpecification"]["TrainingImage"].rpartition("/")[2]
                where = f"{resources['InstanceCount']} x {resources['InstanceType']}"
                print(f"| {notebook.stem} | {where} | {image} | {sent['HyperParameters']['mp_parameters']} |")
            if len(cloud.requests) - before != made:
                print(f"{notebook.stem}: {made} estimators, {len(cloud.requests) - before} requests")
                return 1
            if failed:
                print(f"  (not run to the end, data: {', '.join(failed)})")
    return 0


def train(folder: Path, name: str, out: Path) -> int:
    """Run a notebook's estimator cell on this machine: four hosts with a process each, and a tiny model."""
    from reference_client.__main__ import write_data

    from smp_estimator import ProcessSession, SMPEstimator

    write_data(out / "data")
    scripts = out / "scripts"
    shutil.copytree(folder / "shared-scripts", scripts)
    shutil.copy(Path(__file__).with_name("client.py"), scripts)
    os.environ |= {"SMP_EMULATE_CUDA": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    class WithClient(SMPEstimator):
        """Starts ``client.py``, which starts ``train.py`` with what it lacks here."""

        def __init__(self, **given: Any) -> None:
            super().__init__(**{**given, "entry_point": "client.py", "source_dir": str(scripts)})

    local = f"file://{out / 'data'}"

    def shrink(names: dict[str, Any]) -> None:
        names["hyperparameters"] |= _TINY
        names |= {"instance_type": "local", "instance_count": 4, "hybrid_shard_degree": 2}
        names |= {"sagemaker_session": ProcessSession(root=out / "jobs"), "use_fsx": False, "kwargs": {}}
        names |= {"checkpoint_s3_uri": f"file://{out / 'checkpoints'}", "s3_output_bucket": f"file://{out / 'output'}"}
        names["data_channels"] = {"train": local, "test": local}

    notebook = next(iter(folder.glob(f"*/{name}.ipynb")), None)
    if notebook is None:
        raise SystemExit(
            f"{folder} has no notebook {name}: check out the whole folder of version 2, not only its scripts"
        )
    os.chdir(notebook.parent)
    with stand_ins(WithClient):
        run_cells(notebook, shrink)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", default="", help="the notebook whose job runs here")
    parser.add_argument("--out", type=Path, default=Path("notebook-job"))
    given = parser.parse_args()
    if given.train:
        return train(given.folder.resolve(), given.train, given.out.resolve())
    return show_requests(given.folder.resolve())


if __name__ == "__main__":
    raise SystemExit(main())
