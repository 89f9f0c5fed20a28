"""``ModelParallel`` and ``MPI`` make the dictionary that people write by hand, from one description of the parameters."""

from __future__ import annotations

import ast
import inspect
import json
from typing import Any

import pytest
from support.documents import stubs
from support.platform.jobs import model_parallel

import smp_estimator
from smp_config import ConfigError, ModelParallelParameters
from smp_config.schedules import DEFAULT_SCHEDULE, DOCUMENTED
from smp_estimator import MPI, ModelParallel
from smp_estimator.settings import distribution as strategies


def test_they_are_the_dictionary_that_people_write() -> None:
    made = ModelParallel(pipeline_parallel_degree=2, ddp=True, microbatches=4) | MPI(processes_per_host=2)
    assert made == model_parallel(2, pipeline_parallel_degree=2, ddp=True, microbatches=4)
    assert json.loads(json.dumps(made)) == made
    with_options = MPI(8, custom_mpi_options="-x NCCL_DEBUG=INFO")
    assert with_options == {
        "mpi": {"enabled": True, "processes_per_host": 8, "custom_mpi_options": "-x NCCL_DEBUG=INFO"}
    }
    assert MPI() == {"mpi": {"enabled": True}}


def test_names_that_begin_with_an_underscore_in_the_documents() -> None:
    made = ModelParallel(fp32_grad_accumulation=True, partitions=2)
    assert made["smdistributed"]["modelparallel"]["parameters"] == {"_fp32_grad_accumulation": True, "partitions": 2}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ModelParallel(microbatch=4), "did you mean 'microbatches'"),
        (lambda: ModelParallel(tensor_parallel_degree=2), 'set "ddp": True'),
        (lambda: ModelParallel(ddp="true"), "ddp is 'true'"),
        (lambda: MPI(0), "processes_per_host is 0"),
        (lambda: MPI("2"), "whole number, got '2'"),  # type: ignore[arg-type]
        (lambda: MPI(2, "-x A=1 -x A=2"), "different values"),
    ],
)
def test_mistakes_are_said_where_they_are_made(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_a_job_takes_them(make: Any) -> None:
    made = make(distribution=ModelParallel(ddp=True) | MPI(processes_per_host=2))
    assert json.loads(made.hyperparameters()["mp_parameters"])["ddp"] is True
    with pytest.raises(ConfigError, match="mpi is missing"):
        make(distribution=ModelParallel(ddp=True))


def test_a_number_of_processes_may_come_from_a_pipeline() -> None:
    from sagemaker.workflow.parameters import ParameterInteger

    made = ModelParallel(ddp=True) | MPI(ParameterInteger("Processes", 8))
    read = strategies.read(made, instance_type="ml.p4d.24xlarge", hosts=2, process_mode=False)
    assert "sagemaker_mpi_num_of_processes_per_host" in read.later


def test_the_signature_and_the_help_are_those_of_the_parameters() -> None:
    listed = inspect.signature(ModelParallel).parameters
    assert list(listed) == list(ModelParallelParameters.model_fields)
    for name, field in ModelParallelParameters.model_fields.items():
        assert listed[name].default == field.default
        assert f"{name}: {field.description}" in str(smp_estimator.ModelParallel.__doc__)


def test_the_stub_for_editors_is_up_to_date() -> None:
    """If not: ``python tests/support/documents/stubs.py && make format``."""
    assert ast.dump(ast.parse(stubs.STUB.read_text())) == ast.dump(ast.parse(stubs.stub()))


def test_the_page_of_parameters_is_up_to_date() -> None:
    """If not: ``python tests/support/documents/stubs.py``."""
    text = stubs.PAGE.read_text(encoding="utf-8")
    assert text == stubs.page()
    assert f"| `pipeline` | {', '.join(f'`{name}`' for name in DOCUMENTED)} | `{DEFAULT_SCHEDULE}` |" in text
