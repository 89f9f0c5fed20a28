"""Wrong inputs of a notebook: each error says what is wrong, how it came about, and what to change.

All are found in moments, before anything is started.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.platform.jobs import model_parallel

from smp_config import ConfigError
from smp_estimator import ProcessSession, SMPEstimator

Make = Callable[..., Any]


def changed(**mpi: Any) -> dict[str, Any]:
    distribution = model_parallel(2, ddp=True)
    distribution["mpi"] = mpi
    return distribution


def fit(inputs: Any = None, **arguments: Any) -> Callable[[Make], None]:
    return lambda make: make(**arguments).fit(inputs, logs=False)


#: name → (what the user does, what is wrong, how it came about, what to change)
WRONG: dict[str, tuple[Callable[[Make], Any], str, str, str]] = {
    "entry point": (
        fit(entry_point="trian.py"),
        r"entry_point 'trian\.py' does not exist, did you mean 'train\.py'",
        r"tried /.*scripts/trian\.py \(relative to source_dir .*scripts\), and .* holds helper\.py, train\.py",
        r"correct entry_point or source_dir",
    ),
    "entry point that is a directory": (
        fit(entry_point="."),
        r"entry_point is '\.', but /.*scripts is a directory",
        r"the job runs one script",
        r"name the file, and give the directory as source_dir",
    ),
    "entry point that is no script": (
        fit(entry_point="notes.txt"),
        r"entry_point is 'notes\.txt', whose ending is '\.txt'",
        r"the job starts \.py files with Python and \.sh files with bash",
        r"rename it, for example to 'notes\.py'",
    ),
    "entry point outside source_dir": (
        fit(entry_point="../train.py"),
        r"entry_point '\.\./train\.py' is /.*/train\.py, outside source_dir",
        r"only source_dir is shipped",
        r"leave source_dir out",
    ),
    "logs": (
        lambda make: make().fit(logs="all"),
        r"logs is 'all', and 'all' is not a kind of log, did you mean 'All'",
        r"the SDK has All, None, Training, Rules",
        r"use one of these",
    ),
    "source_dir": (
        fit(source_dir="/no/such/folder"),
        r"source_dir='/no/such/folder' is /no/such/folder, which does not exist",
        r"/ holds .*",
        r"create it or correct the path",
    ),
    "dependency": (
        fit(dependencies=["/no/lib"]),
        r"the dependency '/no/lib' is /no/lib, which does not exist",
        r"/ holds",
        r"correct the path",
    ),
    "channel directory": (
        fit({"train": "file:///no/data"}),
        r"channel 'train' is /no/data, which does not exist",
        r"/ holds",
        r"create it or correct the path",
    ),
    "channel without scheme": (
        fit({"train": "data/train"}),
        r"channel 'train' is 'data/train', which is neither a file:// nor an s3:// address",
        r"plain paths are not read as addresses",
        r"write 'file:///.*/data/train'",
    ),
    "channel name": (
        fit({"../train": "file:///tmp"}),
        r"the channel name '\.\./train' has characters that a folder .* cannot have",
        r"names are made of letters",
        r"rename it, for example to 'train'",
    ),
    "unknown parameter": (
        fit(distribution=model_parallel(2, microbatch=2)),
        r"unknown parameter 'microbatch'",
        r"",
        r"did you mean 'microbatches'",
    ),
    "unknown strategy": (
        fit(distribution={"smdistribute": {"modelparallel": {"enabled": True}}}),
        r"unknown strategy 'smdistribute' in distribution, did you mean 'smdistributed'",
        r"an unknown one would be dropped silently",
        r"use one of smdistributed, mpi",
    ),
    "misspelt library": (
        fit(distribution={"smdistributed": {"modelparalel": {"enabled": True}}}),
        r"unknown key 'modelparalel'",
        r"'smdistributed'",
        r"did you mean 'modelparallel'",
    ),
    "enabled as text": (
        fit(distribution={**model_parallel(2), "smdistributed": {"modelparallel": {"enabled": "true"}}}),
        r"\"enabled\": 'true', a str",
        r"only a boolean turns the strategy on",
        r"write True or False without quotes",
    ),
    "enabled missing": (
        fit(distribution={**model_parallel(2), "smdistributed": {"modelparallel": {"parameters": {}}}}),
        r"smdistributed.modelparallel has no \"enabled\"",
        r"dropped silently",
        r"add \"enabled\": True",
    ),
    "mpi missing": (
        fit(distribution={"smdistributed": {"modelparallel": {"enabled": True}}}),
        r"modelparallel is enabled, but mpi is missing",
        r"distribution has \['smdistributed'\]",
        r"add \"mpi\": \{\"enabled\": True, \"processes_per_host\": 2\}",
    ),
    "mpi disabled": (
        fit(distribution=changed(enabled=False, processes_per_host=2)),
        r"modelparallel is enabled, but mpi is disabled",
        r"mpirun starts the ranks",
        r"add \"mpi\"",
    ),
    "both libraries": (
        fit(
            distribution={
                "smdistributed": {"modelparallel": {"enabled": True}, "dataparallel": {"enabled": True}},
                "mpi": {"enabled": True, "processes_per_host": 2},
            }
        ),
        r"enables both modelparallel and dataparallel",
        r"one job runs one of the two",
        r"remove one",
    ),
    "more degrees than processes": (
        fit(distribution=model_parallel(2, pipeline_parallel_degree=4, tensor_parallel_degree=2, ddp=True)),
        r"pipeline_parallel_degree 4 × tensor_parallel_degree 2 = 8 processes, which is more than",
        r"2 processes = mpi\.processes_per_host 2 × instance_count 1",
        r"set processes_per_host to 8",
    ),
    "no processes": (
        fit(distribution=changed(enabled=True, processes_per_host=0)),
        r"processes_per_host is 0",
        r"number of processes that each host starts",
        r"set it to 1 or more",
    ),
    "buffer size": (
        fit(distribution=model_parallel(2, ddp=True), environment={"SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "100000"}),
        r"SMDDP_AG_SORT_BUFFER_SIZE_BYTES is 100000",
        r"12 × 8192 \+ 1696",
        r"set it to 98304 or 106496",
    ),
    "mpi options": (
        fit(
            distribution=changed(enabled=True, processes_per_host=2, custom_mpi_options="--bind-to none --bind-to core")
        ),
        r"custom_mpi_options sets the same thing to different values",
        r"'--bind-to none' and '--bind-to core'",
        r"keep one",
    ),
    "parameters file": (
        fit(
            distribution={
                "smdistributed": {"modelparallel": {"enabled": True, "parameters": "params.json"}},
                "mpi": {"enabled": True, "processes_per_host": 2},
            }
        ),
        r"parameters is 'params\.json'",
        r"a string means the path of a JSON file, and there is none at /",
        r"give a dictionary or an existing file",
    ),
    "another launcher": (
        fit(distribution={"torch_distributed": {"enabled": True}}),
        r"distribution enables 'torch_distributed'",
        r"started with mpirun",
        r"use \{\"mpi\"",
    ),
    "entry point type": (
        fit(entry_point=7),
        r"entry_point is 7, an int",
        r"must be text or a path",
        r"entry_point='train\.py'",
    ),
    "instance count": (
        fit(instance_count="2"),
        r"instance_count is '2' \(str\)",
        r"a number of hosts",
        r"write instance_count=1 or more",
    ),
    "hyperparameter": (
        fit(hyperparameters={"model": object()}),
        r"hyperparameter 'model' is <object",
        r"sent as JSON and this one cannot be",
        r"convert it",
    ),
    "hyperparameters type": (
        lambda make: SMPEstimator(entry_point="t.py", instance_type="local", hyperparameters=["steps"]),
        r"hyperparameters is \['steps'\], a list",
        r"names and values are read from it",
        r"write a dictionary",
    ),
    "environment": (
        fit(environment={"THREADS": 2}),
        r"environment variable 'THREADS' is 2, an int",
        r"variables hold text",
        r"write '2'",
    ),
    "distribution type": (
        fit(distribution="smdistributed"),
        r"distribution is 'smdistributed', a str",
        r"strategies are read from its keys",
        r"give a dictionary",
    ),
    "output path": (
        fit(output_path="out"),
        r"output_path is 'out', which is neither",
        r"plain paths are not read",
        r"write 'file:///.*/out'",
    ),
    "checkpoints in S3": (
        fit(checkpoint_s3_uri="s3://bucket/checkpoints"),
        r"checkpoint_s3_uri is 's3://bucket/checkpoints'",
        r"nothing copies the checkpoints .* to S3",
        r"give a local directory, for example 'file:///",
    ),
    "checkpoint path": (
        fit(checkpoint_s3_uri="file:///tmp/c", checkpoint_local_path="/my/checkpoints"),
        r"checkpoint_local_path is '/my/checkpoints'",
        r"in its own /opt/ml/checkpoints only",
        r"leave checkpoint_local_path out",
    ),
    "checkpoint path alone": (
        fit(checkpoint_local_path="/opt/ml/checkpoints"),
        r"checkpoint_s3_uri is missing",
        r"where the script writes",
        r"add checkpoint_s3_uri='file:///",
    ),
    "job name": (
        lambda make: make().fit(job_name="my_job"),
        r"the job name 'my_job' \(6 characters\) is not one that the service accepts",
        r"it comes from job_name= or base_job_name=",
        r"use at most 63 letters",
    ),
    "pipe mode": (
        lambda make: make().fit({"train": _channel(input_mode="Pipe")}),
        r"channel 'train' asks for input mode 'Pipe'",
        r"reads plain files",
        r"use 'File' or 'FastFile'",
    ),
    "pipe mode of the job": (
        lambda make: make(input_mode="Pipe").fit({"train": "file:///tmp"}),
        r"channel 'train' asks for input mode 'Pipe'",
        r"reads plain files",
        r"use 'File' or 'FastFile'",
    ),
    "pipe mode of a job without channels": (
        lambda make: make(input_mode="Pipe").fit(),
        r"input_mode is 'Pipe'",
        r"reads plain files",
        r"use 'File' or 'FastFile'",
    ),
    "compressed channel": (
        lambda make: make().fit({"train": _channel(compression="Gzip")}),
        r"channel 'train' has CompressionType 'Gzip'",
        r"reads the files of a folder as they are",
        r"leave it out",
    ),
    "wrapped channel": (
        lambda make: make().fit({"train": _channel(record_wrapping="RecordIO")}),
        r"channel 'train' has RecordWrapperType 'RecordIO'",
        r"as they are",
        r"leave it out",
    ),
    "shuffled channel": (
        lambda make: make().fit({"train": _channel(shuffle_config=_shuffled())}),
        r"channel 'train' has ShuffleConfig .*7",
        r"as they are",
        r"leave it out",
    ),
    "channel of some groups": (
        lambda make: make().fit({"train": _channel(instance_groups=["one"])}),
        r"channel 'train' has InstanceGroupNames \['one'\]",
        r"on all hosts",
        r"leave it out",
    ),
    "no entry point": (
        lambda make: SMPEstimator(instance_type="local"),
        r"entry_point is missing",
        r"the script that every rank runs",
        r"add entry_point=\"train\.py\"",
    ),
    "grace": (
        lambda make: ProcessSession(stop_grace_seconds=-1),
        r"stop_grace_seconds=-1\) is negative",
        r"time in seconds between SIGTERM and SIGKILL",
        r"use 0 or more",
    ),
}


def _channel(**given: Any) -> Any:
    from sagemaker.inputs import TrainingInput

    return TrainingInput("file:///tmp", **given)


def _shuffled() -> Any:
    from sagemaker.inputs import ShuffleConfig

    return ShuffleConfig(7)


@pytest.mark.parametrize("name", WRONG)
def test_three_parts(name: str, make: Make, tmp_path: Path) -> None:
    act, wrong, how, change = WRONG[name]
    (tmp_path / "scripts" / "notes.txt").write_text("")
    with pytest.raises(ConfigError) as caught:
        act(make)
    message = str(caught.value)
    for part in (wrong, how, change):
        assert re.search(part, message, re.DOTALL), f"{part!r} is not in: {message}"
    jobs = tmp_path / "jobs"
    assert not jobs.exists() or not list(jobs.iterdir()), "nothing was left behind"


def test_attributes_changed_after_the_constructor_are_checked_again(make: Make) -> None:
    estimator = make(distribution=model_parallel(2, ddp=True))
    estimator.distribution["smdistributed"]["modelparallel"]["parameters"]["tensor_parallel_degree"] = 3
    with pytest.raises(ConfigError, match=r"3 processes, which is more than the 2 processes"):
        estimator.fit()


def test_a_name_is_used_once(make: Make) -> None:
    estimator = make(hyperparameters={"steps": 1})
    estimator.fit(logs=False, job_name="once")
    with pytest.raises(ConfigError, match=r"a job named 'once' exists already \(Completed\).*leave job_name out"):
        estimator.fit(logs=False, job_name="once")
