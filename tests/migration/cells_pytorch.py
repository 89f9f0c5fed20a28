"""Cells with the PyTorch estimator, written for these tests in the manner of notebooks of AWS and its users."""

from __future__ import annotations

from migration.cell import Cell

BUCKET = "sagemaker-us-east-1-123456789012"

CELLS = (
    Cell(
        "one instance, metrics, channels from variables",
        (
            """import sagemaker
from sagemaker.pytorch import PyTorch

sess = sagemaker.Session()
bucket = sess.default_bucket()
prefix = "digits"
role = sagemaker.get_execution_role()
inputs = f"s3://{bucket}/{prefix}/images"
""",
            """# One GPU is enough here
estimator = PyTorch(
    entry_point="train.py",
    source_dir="scripts",
    role=role,
    framework_version="2.0.1",
    py_version="py310",
    instance_count=1,
    instance_type="ml.g4dn.xlarge",
    hyperparameters={"epochs": 6, "lr": 0.01, "backend": "gloo"},
    metric_definitions=[{"Name": "test:accuracy", "Regex": "accuracy=(.*?);"}],
    output_path=f"s3://{bucket}/{prefix}/models",
)
estimator.fit({"training": inputs})
""",
            "print(estimator.model_data)\nprint(f'the job was {estimator.latest_training_job.name}')\n",
        ),
        (
            {
                "type": "ml.g4dn.xlarge",
                "image": "pytorch-training:2.0.1-gpu-py310",
                "hyperparameters": {"epochs": 6, "lr": 0.01, "backend": "gloo"},
                "channels": {"training": f"s3://{BUCKET}/digits/images"},
                "metrics": ["test:accuracy"],
                "output": f"s3://{BUCKET}/digits/models",
            },
        ),
    ),
    Cell(
        "data parallel library, distribution in a variable",
        (
            """import boto3
import sagemaker
from sagemaker import get_execution_role
from sagemaker.pytorch import PyTorch

role = get_execution_role()
session = sagemaker.session.Session(boto3.session.Session())
distribution = {"smdistributed": {"dataparallel": {"enabled": True}}}
job = PyTorch(
    base_job_name="masks",
    entry_point="train.py",
    source_dir="scripts",
    role=role,
    framework_version="1.12.0",
    py_version="py38",
    instance_count=2,
    instance_type="ml.p4d.24xlarge",
    sagemaker_session=session,
    hyperparameters=dict(batch_size=32, epochs=1),
    debugger_hook_config=False,
    distribution=distribution,
)
job.fit(f"s3://{session.default_bucket()}/coco", wait=False)
""",
        ),
        (
            {
                "type": "ml.p4d.24xlarge",
                "count": 2,
                "image": "pytorch-training:1.12.0-gpu-py38",
                "hyperparameters": {"batch_size": 32, "epochs": 1},
                "channels": {"training": f"s3://{BUCKET}/coco"},
                "strategy": "torchrun",
                "name": "masks",
            },
        ),
        ("smdistributed.dataparallel has no place in SDK v3",),
    ),
    Cell(
        "model parallel library, its options in variables",
        (
            """from sagemaker import get_execution_role
from sagemaker.pytorch import PyTorch

smp_options = {
    "enabled": True,
    "parameters": {"partitions": 2, "microbatches": 4, "placement_strategy": "spread", "ddp": True},
}
mpi_options = {"enabled": True, "processes_per_host": 8}
pipeline = PyTorch(
    entry_point="train.py",
    source_dir="scripts",
    role=get_execution_role(),
    instance_type="ml.p3.16xlarge",
    instance_count=1,
    framework_version="1.13.1",
    py_version="py39",
    distribution={"smdistributed": {"modelparallel": smp_options}, "mpi": mpi_options},
    disable_profiler=True,
)
pipeline.fit()
""",
        ),
        (
            {
                "type": "ml.p3.16xlarge",
                "strategy": "modelparallel partitions=2 on 8",
            },
        ),
        ("PyTorch 1.13.1 is older than the runtime's 2.4",),
    ),
    Cell(
        "torch_distributed, warm pool, environment",
        (
            """import sagemaker
from sagemaker.pytorch.estimator import PyTorch

instances, kind = 2, "ml.g5.12xlarge"
llm = PyTorch(
    entry_point="train.py",
    source_dir="./scripts",
    role=sagemaker.get_execution_role(),
    framework_version="2.2.0",
    py_version="py310",
    instance_count=instances,
    instance_type=kind,
    volume_size=200,
    max_run=2 * 24 * 3600,
    keep_alive_period_in_seconds=1800,
    environment={"NCCL_DEBUG": "WARN", "FI_EFA_FORK_SAFE": "1"},
    distribution={"torch_distributed": {"enabled": True}},
)
llm.fit({"train": sagemaker.inputs.TrainingInput("s3://corpus/train", input_mode="FastFile")}, logs=True)
""",
        ),
        (
            {
                "type": "ml.g5.12xlarge",
                "count": 2,
                "volume": 200,
                "max_run": 172800,
                "keep_alive": 1800,
                "image": "pytorch-training:2.2.0-gpu-py310",
                "environment": {"NCCL_DEBUG": "WARN", "FI_EFA_FORK_SAFE": "1"},
                "channels": {"train": "s3://corpus/train FastFile"},
                "strategy": "torchrun",
            },
        ),
    ),
    Cell(
        "MPI only, options on two lines",
        (
            """from sagemaker.pytorch import PyTorch
import sagemaker
role = sagemaker.get_execution_role(); sess = sagemaker.Session()
mpi = {
    "mpi": {
        "enabled": True,
        "processes_per_host": 4,
        "custom_mpi_options": "-x NCCL_DEBUG=INFO "
        "--verbose",
    }
}
est = PyTorch("train.py", source_dir="scripts", role=role, instance_count=2, instance_type="ml.p3.8xlarge",
              framework_version="1.13", py_version="py39", distribution=mpi, sagemaker_session=sess)
est.fit({"data": "s3://corpus/horovod"}, logs="All")
""",
        ),
        (
            {
                "type": "ml.p3.8xlarge",
                "count": 2,
                "image": "pytorch-training:1.13-gpu-py39",
                "channels": {"data": "s3://corpus/horovod"},
                "strategy": "mpi 4 -x NCCL_DEBUG=INFO --verbose",
            },
        ),
    ),
    Cell(
        "spot instances behind a switch that is off",
        (
            """import sagemaker
from sagemaker.pytorch import PyTorch

use_spot = False
max_run = 3600
max_wait = 7200 if use_spot else None
checkpoints = "s3://corpus/checkpoints" if use_spot else None
est = PyTorch(
    entry_point="train.py",
    source_dir="scripts",
    role=sagemaker.get_execution_role(),
    instance_count=1,
    instance_type="ml.p3.2xlarge",
    framework_version="2.1.0",
    py_version="py310",
    use_spot_instances=use_spot,
    max_run=max_run,
    max_wait=max_wait,
    checkpoint_s3_uri=checkpoints,
)
est.fit("s3://corpus/small")
""",
        ),
        (
            {
                "type": "ml.p3.2xlarge",
                "max_run": 3600,
                "image": "pytorch-training:2.1.0-gpu-py310",
                "channels": {"training": "s3://corpus/small"},
            },
        ),
    ),
    Cell(
        "spot instances with checkpoints, tags, a private network",
        (
            """from sagemaker.pytorch import PyTorch
import sagemaker

bucket = sagemaker.Session().default_bucket()
run_name = "night"
est = PyTorch(
    entry_point="train.py",
    source_dir="scripts",
    image_uri="123456789012.dkr.ecr.us-east-1.amazonaws.com/own:4",
    role="arn:aws:iam::123456789012:role/trainer",
    instance_count=1,
    instance_type="ml.g5.2xlarge",
    use_spot_instances=True,
    max_run=10800,
    max_wait=21600,
    checkpoint_s3_uri=f"s3://{bucket}/{run_name}/checkpoints",
    checkpoint_local_path="/opt/ml/checkpoints",
    tags=[{"Key": "project", "Value": run_name}],
    subnets=["subnet-0a1b2c3d"],
    security_group_ids=["sg-0a1b2c3d"],
    encrypt_inter_container_traffic=True,
    enable_network_isolation=False,
)
est.fit({"train": "s3://corpus/a", "validation": "s3://corpus/b"}, wait=True)
""",
        ),
        (
            {
                "type": "ml.g5.2xlarge",
                "spot": True,
                "max_run": 10800,
                "max_wait": 21600,
                "checkpoint": f"s3://{BUCKET}/night/checkpoints",
                "image": "own:4",
                "role": "arn:aws:iam::123456789012:role/trainer",
                "tags": {"project": "night"},
                "subnets": ["subnet-0a1b2c3d"],
                "groups": ["sg-0a1b2c3d"],
                "channels": {"train": "s3://corpus/a", "validation": "s3://corpus/b"},
            },
        ),
    ),
    Cell(
        "a file system alone as the input",
        (
            """from sagemaker import get_execution_role
from sagemaker.inputs import FileSystemInput
from sagemaker.pytorch import PyTorch

data = FileSystemInput(
    file_system_id="fs-0123456789abcdef0",
    file_system_type="FSxLustre",
    directory_path="/abcdefgh/imagenet",
    file_system_access_mode="ro",
)
est = PyTorch(
    entry_point="train.py",
    source_dir="scripts",
    role=get_execution_role(),
    framework_version="2.3.0",
    py_version="py311",
    instance_count=1,
    instance_type="ml.p4d.24xlarge",
    subnets=["subnet-1"],
    security_group_ids=["sg-1"],
    input_mode="File",
)
est.fit(inputs=data)
""",
        ),
        (
            {
                "type": "ml.p4d.24xlarge",
                "image": "pytorch-training:2.3.0-gpu-py311",
                "subnets": ["subnet-1"],
                "groups": ["sg-1"],
                "channels": {"training": "fs-0123456789abcdef0 FSxLustre /abcdefgh/imagenet ro"},
            },
        ),
    ),
    Cell(
        "a helper function, and a loop over instance types",
        (
            """import sagemaker
from sagemaker.pytorch import PyTorch

def make(kind: str, count: int = 1) -> PyTorch:
    return PyTorch(
        entry_point="train.py",
        source_dir="scripts",
        role=sagemaker.get_execution_role(),
        framework_version="2.1",
        py_version="py310",
        instance_type=kind,
        instance_count=count,
        hyperparameters={"kind": kind},
    )

started = {}
for kind in ("ml.g5.xlarge", "ml.g4dn.xlarge"):
    estimator = make(kind)
    estimator.fit({"train": "s3://corpus/c"}, wait=False)
    started[kind] = estimator
""",
            """for kind, each in started.items():
    print(kind, each.latest_training_job.name, isinstance(each, PyTorch), each.hyperparameters()["kind"])
""",
        ),
        tuple(
            {
                "type": kind,
                "image": "pytorch-training:2.1-gpu-py310",
                "hyperparameters": {"kind": kind},
                "channels": {"train": "s3://corpus/c"},
            }
            for kind in ("ml.g5.xlarge", "ml.g4dn.xlarge")
        ),
    ),
    Cell(
        "a list of estimators, started by a function",
        (
            """from sagemaker.pytorch import PyTorch
import sagemaker as sm

jobs = [
    PyTorch(
        entry_point="train.py",
        source_dir="scripts",
        role=sm.get_execution_role(),
        framework_version="2.1",
        py_version="py310",
        instance_type="ml.g5.xlarge",
        instance_count=1,
        hyperparameters={"lr": rate},
    )
    for rate in (0.1, 0.01)
]

def launch(job, data):
    job.fit({"train": data}, wait=False)
    return job.latest_training_job.name

names = [launch(each, sm.Session().default_bucket()) for each in jobs] if False else []
for number, each in enumerate(jobs):
    names.append(launch(each, f"s3://{sm.Session().default_bucket()}/{number}"))
""",
        ),
        tuple(
            {
                "type": "ml.g5.xlarge",
                "image": "pytorch-training:2.1-gpu-py310",
                "hyperparameters": {"lr": rate},
                "channels": {"train": f"s3://{BUCKET}/{number}"},
            }
            for number, rate in enumerate((0.1, 0.01))
        ),
    ),
    Cell(
        "an entry point alone, by a path in a variable",
        (
            """import os
import sagemaker
from sagemaker.pytorch import PyTorch

script = os.path.join("scripts", "train.py")
est = PyTorch(
    entry_point=script,
    role=sagemaker.get_execution_role(),
    framework_version="2.1",
    py_version="py310",
    instance_type="ml.m5.xlarge",
    instance_count=1,
)
est.fit()
""",
        ),
        ({"type": "ml.m5.xlarge", "image": "pytorch-training:2.1-cpu-py310"},),
        ("entry_point stood alone and travelled alone",),
    ),
    Cell(
        "magics, a question, names of SDK v1, the job's own name",
        (
            """!pip install -q \\
    "sagemaker>=2.140,<3" boto3
%load_ext autoreload
files = !ls scripts
import sagemaker
from sagemaker.pytorch import PyTorch
""",
            """%%time
old = PyTorch(
    entry_point="train.py",
    source_dir="scripts",
    role=sagemaker.get_execution_role(),
    framework_version="1.13.1",
    py_version="py39",
    train_instance_type="ml.p3.2xlarge",
    train_instance_count=1,
    train_max_run=600,
)
old.fit({"train": "s3://corpus/old"}, job_name="my-own-name")
""",
            "old?\n",
        ),
        (
            {
                "type": "ml.p3.2xlarge",
                "max_run": 600,
                "image": "pytorch-training:1.13.1-gpu-py39",
                "channels": {"train": "s3://corpus/old"},
            },
        ),
        ("this installs version 2 of the SDK", "fit(job_name="),
    ),
    Cell(
        "profiler, rules, a repository, dependencies",
        (
            """import sagemaker
from sagemaker.debugger import FrameworkProfile, ProfilerConfig, ProfilerRule, rule_configs
from sagemaker.pytorch import PyTorch

rules = [ProfilerRule.sagemaker(rule_configs.ProfilerReport())]
est = PyTorch(
    entry_point="train.py",
    source_dir="scripts",
    role=sagemaker.get_execution_role(),
    framework_version="1.13.1",
    py_version="py39",
    instance_type="ml.p3.2xlarge",
    instance_count=1,
    profiler_config=ProfilerConfig(
        system_monitor_interval_millis=500,
        framework_profile_params=FrameworkProfile(),
    ),
    rules=rules,
    dependencies=["lib"],
)
est.fit()
""",
        ),
        ({"type": "ml.p3.2xlarge", "image": "pytorch-training:1.13.1-gpu-py39"},),
        (
            "profiler_config=ProfilerConfig( system_monitor_interval_millis=500, framework_profile_params=FrameworkProfile(), )",
            "rules=rules has no place in ModelTrainer",
            'dependencies=["lib"] has no place in ModelTrainer',
        ),
    ),
)
