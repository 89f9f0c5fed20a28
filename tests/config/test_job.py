"""The distribution dictionary, the hyperparameters that carry it, and the lines that ranks and client exchange."""

from __future__ import annotations

import json

import pytest

from smp_config import ConfigError, JobSettings
from smp_records.records import (
    FailureRecord,
    ProgressRecord,
    format_failure,
    format_progress,
    parse_failure,
    parse_progress,
)

MODEL_PARALLEL = {
    "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2, "ddp": True}}},
    "mpi": {"enabled": True, "processes_per_host": 8, "custom_mpi_options": "-verbose"},
}


def test_hyperparameters_are_those_the_platform_knows():
    sent = JobSettings.from_distribution(MODEL_PARALLEL, "ml.p4d.24xlarge").to_hyperparameters()
    assert sent == {
        "mp_parameters": {"partitions": 2, "pipeline_parallel_degree": 2, "ddp": True},
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 8,
        "sagemaker_mpi_custom_mpi_options": "-verbose",
        "sagemaker_instance_type": "ml.p4d.24xlarge",
    }


@pytest.mark.parametrize("encode", [lambda value: value, json.dumps], ids=["values", "json"])
@pytest.mark.parametrize(
    "distribution",
    [
        MODEL_PARALLEL,
        {"smdistributed": {"dataparallel": {"enabled": True, "custom_mpi_options": "-x A=1"}}},
        {"mpi": {"enabled": True, "processes_per_host": 2}},
        {},
    ],
    ids=["modelparallel", "dataparallel", "mpi", "none"],
)
def test_what_is_sent_is_what_is_read(distribution, encode):
    settings = JobSettings.from_distribution(distribution, "ml.g5.12xlarge")
    carried = {name: encode(value) for name, value in settings.to_hyperparameters().items()}
    assert (
        JobSettings.from_hyperparameters({**carried, "learning_rate": "0.1"}).to_hyperparameters()
        == settings.to_hyperparameters()
    )


def test_the_recommended_mpi_option_is_the_default():
    distribution = {**MODEL_PARALLEL, "mpi": {"enabled": True, "processes_per_host": 2}}
    sent = JobSettings.from_distribution(distribution).to_hyperparameters()
    assert sent["sagemaker_mpi_custom_mpi_options"] == "--mca btl_vader_single_copy_mechanism none"


def test_parameters_from_a_file(tmp_path):
    file = tmp_path / "parameters.json"
    file.write_text('{"microbatches": 4}')
    settings = JobSettings.from_distribution(
        {"smdistributed": {"modelparallel": {"enabled": True, "parameters": str(file)}}}
    )
    assert settings.model_parallel.microbatches == 4


@pytest.mark.parametrize(
    ("distribution", "says"),
    [
        ({"smdistributed": {"modelparalel": {"enabled": True}}}, "did you mean 'modelparallel'"),
        ({"smdistributed": {"modelparallel": {"parameters": {}}}}, 'has no "enabled"'),
        ({"smdistributed": {"modelparallel": {"enabled": "true"}}}, "without quotes"),
        ({"smdistributed": {"modelparallel": {"enabled": True, "parameters": "/no/such.json"}}}, "there is none at"),
        ({"smdistributed": {"modelparallel": True}}, "must be a dictionary"),
        (
            {"smdistributed": {"modelparallel": {"enabled": True}, "dataparallel": {"enabled": True}}},
            "remove one",
        ),
        ({"mpi": {"enabled": True, "process_per_host": 2}}, "did you mean 'processes_per_host'"),
        ({"mpi": {"enabled": True, "processes_per_host": "2"}}, "whole number"),
    ],
)
def test_wrong_distributions_say_what_to_change(distribution, says):
    with pytest.raises(ConfigError) as error:
        JobSettings.from_distribution(distribution)
    assert says in str(error.value)


def test_a_disabled_strategy_is_dropped():
    settings = JobSettings.from_distribution(
        {"smdistributed": {"modelparallel": {"enabled": False, "parameters": {"x": 1}}}}
    )
    assert settings.model_parallel is None
    assert not settings.uses_mpi


def test_progress_line_round_trip():
    record = ProgressRecord(step=3, total_steps=10, loss=1.5, samples_per_second=12.0)
    assert parse_progress("[1,0]<stdout>:" + format_progress(record) + "\n") == record
    assert parse_progress("step 3") is None
    assert parse_progress('smp-progress {"step": ') is None


def test_failure_line_keeps_rank_and_message_however_long():
    error = ValueError("b" * 50_000)
    line = format_failure(FailureRecord.of(1, "algo-1", error, "t" * 90_000 + "last frame"))
    assert len(line.encode()) <= 4096
    record = parse_failure(line)
    assert record.rank == 1
    assert record.headline().startswith("rank 1 (algo-1): ValueError: bbb")
    assert len(parse_failure(format_failure(FailureRecord.of(0, "", ValueError("ü€" * 5000), ""))).message) > 1000
    short = parse_failure(format_failure(FailureRecord.of(0, "", ValueError("ü\n" * 10), "x" * 9000 + "last frame")))
    assert short.message == "ü\n" * 10
    assert short.traceback.endswith("last frame")


def test_switches_are_read_as_by_the_training_toolkit():
    """A job that no SDK started may have Python's word for true."""
    sent = {"sagemaker_mpi_enabled": "True", "sagemaker_mpi_num_of_processes_per_host": "8", "mp_parameters": "{}"}
    assert JobSettings.from_hyperparameters(sent).mpi.enabled is True
    data = {"sagemaker_distributed_dataparallel_enabled": "True"}
    assert JobSettings.from_hyperparameters(data).data_parallel.enabled is True
    with pytest.raises(ConfigError, match="False"):
        JobSettings.from_hyperparameters({**sent, "sagemaker_mpi_enabled": "False"})
