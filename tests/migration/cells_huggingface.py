"""Cells with the HuggingFace estimator or version 2 of the library, and those that a person has to change."""

from __future__ import annotations

from migration.cell import Cell

BUCKET = "sagemaker-us-east-1-123456789012"

CELLS = (
    Cell(
        "the role of a user, fine-tuning on one GPU",
        (
            """import boto3
import sagemaker

sess = sagemaker.Session()
sagemaker_session_bucket = None
if sagemaker_session_bucket is None and sess is not None:
    sagemaker_session_bucket = sess.default_bucket()
try:
    role = sagemaker.get_execution_role()
except ValueError:
    role = boto3.client("iam").get_role(RoleName="trainer")["Role"]["Arn"]
sess = sagemaker.Session(default_bucket=sagemaker_session_bucket)
print(f"role: {role}, bucket: {sess.default_bucket()}, region: {sess.boto_region_name}")
""",
            """from sagemaker.huggingface import HuggingFace

# what the script reads
hyperparameters = {"epochs": 1, "train_batch_size": 32, "model_name": "distilbert-base-uncased"}
training_input_path = f"s3://{sess.default_bucket()}/reviews/train"
test_input_path = "s3://{}/reviews/test".format(sess.default_bucket())
huggingface_estimator = HuggingFace(
    entry_point="train.py",
    source_dir="./scripts",
    instance_type="ml.p3.2xlarge",
    instance_count=1,
    role=role,
    transformers_version="4.26",
    pytorch_version="1.13",
    py_version="py39",
    hyperparameters=hyperparameters,
)
huggingface_estimator.fit({"train": training_input_path, "test": test_input_path})
""",
        ),
        (
            {
                "type": "ml.p3.2xlarge",
                "role": "arn:aws:iam::123456789012:role/trainer",
                "image": "huggingface-pytorch-training:1.13-transformers4.26",
                "hyperparameters": {"epochs": 1, "train_batch_size": 32, "model_name": "distilbert-base-uncased"},
                "channels": {"train": f"s3://{BUCKET}/reviews/train", "test": f"s3://{BUCKET}/reviews/test"},
            },
        ),
        is_user=True,
    ),
    Cell(
        "upload, a script of a repository, then deploy",
        (
            """from sagemaker import Session, get_execution_role
from sagemaker.huggingface import HuggingFace
from sagemaker.s3 import S3Uploader

session = Session()
open("a.jsonl", "w").write("{}")
where = S3Uploader.upload("a.jsonl", f"s3://{session.default_bucket()}/qa", sagemaker_session=session)
est = HuggingFace(
    entry_point="run_qa.py",
    source_dir="examples/question-answering",
    git_config={"repo": "https://example.com/transformers.git", "branch": "v4.49.0"},
    role=get_execution_role(),
    instance_type="ml.g5.xlarge",
    instance_count=1,
    transformers_version="4.49.0",
    pytorch_version="2.5.1",
    py_version="py311",
    sagemaker_session=session,
)
""",
        ),
        (),
        ("git_config=", "est.deploy is not in ModelTrainer"),
        (
            "est.fit({'train': where})\npredictor = est.deploy(1, 'ml.g5.xlarge')\npredictor.predict({'inputs': 'why'})\n",
        ),
    ),
    Cell(
        "data parallel library, metrics in a variable, a model afterwards",
        (
            """import sagemaker

metrics = [{"Name": "loss", "Regex": "'loss': ([0-9.]+)"}, {"Name": "f1", "Regex": "f1 = ([0-9.]+)"}]
est = sagemaker.huggingface.HuggingFace(
    entry_point="train.py",
    source_dir="scripts",
    role=sagemaker.get_execution_role(),
    instance_type="ml.p3.16xlarge",
    instance_count=2,
    volume_size=100,
    transformers_version="4.17.0",
    pytorch_version="1.10.2",
    py_version="py38",
    metric_definitions=metrics,
    distribution={"smdistributed": {"dataparallel": {"enabled": True}}},
    hyperparameters={"model_name_or_path": "bert-large-uncased", "fp16": True, "seed": 7},
)
est.fit()
""",
        ),
        (
            {
                "type": "ml.p3.16xlarge",
                "count": 2,
                "volume": 100,
                "metrics": ["loss", "f1"],
                "image": "huggingface-pytorch-training:1.10.2-transformers4.17.0",
                "hyperparameters": {"model_name_or_path": "bert-large-uncased", "fp16": True, "seed": 7},
                "strategy": "torchrun",
            },
        ),
        (
            "smdistributed.dataparallel has no place in SDK v3",
            "SDK v3 has no sagemaker.huggingface.HuggingFaceModel",
        ),
        (
            "model = sagemaker.huggingface.HuggingFaceModel(model_data=est.model_data, role=sagemaker.get_execution_role())\n",
        ),
    ),
    Cell(
        "model parallel library with its dictionary in the call",
        (
            """from sagemaker.huggingface import HuggingFace
from sagemaker import get_execution_role

processes = 8
mp_parameters = {"microbatches": 4, "placement_strategy": "spread", "pipeline": "interleaved", "partitions": 4, "ddp": True}
est = HuggingFace(
    entry_point="train.py",
    source_dir="scripts",
    role=get_execution_role(),
    instance_type="ml.p4d.24xlarge",
    instance_count=1,
    transformers_version="4.49.0",
    pytorch_version="2.5.1",
    py_version="py311",
    distribution={
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": mp_parameters}},
        "mpi": {"enabled": True, "processes_per_host": processes, "custom_mpi_options": "-x NCCL_DEBUG=WARN"},
    },
    environment={"TOKENIZERS_PARALLELISM": "false"},
    base_job_name="glue",
)
est.fit({"train": "s3://corpus/glue"}, wait=False)
est.logs()
""",
        ),
        (
            {
                "type": "ml.p4d.24xlarge",
                "image": "huggingface-pytorch-training:2.5.1-transformers4.49.0",
                "strategy": "modelparallel partitions=4 on 8",
                "environment": {"TOKENIZERS_PARALLELISM": "false"},
                "channels": {"train": "s3://corpus/glue"},
                "name": "glue",
            },
        ),
    ),
    Cell(
        "LoRA: a token in the environment, a name from the time, no compression",
        (
            """import os
import time
import sagemaker
from sagemaker.huggingface.estimator import HuggingFace

model_id = "org/model-7b"
job_name = f'qlora-{model_id.split("/")[-1]}-{time.strftime("%Y-%m-%d")}'
est = HuggingFace(
    entry_point          = 'train.py',      # train script
    source_dir           = 'scripts',
    instance_type        = 'ml.g5.4xlarge',
    instance_count       = 1,
    base_job_name        = job_name,
    role                 = sagemaker.get_execution_role(),
    volume_size          = 300,
    transformers_version = '4.36',
    pytorch_version      = '2.1',
    py_version           = 'py310',
    hyperparameters      =  {
      'model_id': model_id,                 # pre-trained model
      'lora_r': 64, 'lora_alpha': 16,
      'merge_weights': True,
    },
    environment          = {"HUGGINGFACE_HUB_CACHE": "/tmp/.cache", "HF_TOKEN": os.environ.get("HF_TOKEN", "")},
    disable_output_compression = True,
)
data = {'training': f's3://{sagemaker.Session().default_bucket()}/dolly/train'}
est.fit(data, wait=True)
print(est.model_data)
""",
        ),
        (
            {
                "type": "ml.g5.4xlarge",
                "volume": 300,
                "image": "huggingface-pytorch-training:2.1-transformers4.36",
                "hyperparameters": {"model_id": "org/model-7b", "lora_r": 64, "lora_alpha": 16, "merge_weights": True},
                "environment": {"HUGGINGFACE_HUB_CACHE": "/tmp/.cache", "HF_TOKEN": ""},
                "channels": {"training": f"s3://{BUCKET}/dolly/train"},
                "compression": "NONE",
                "name": "qlora-model-7b",
            },
        ),
    ),
    Cell(
        "torch_distributed by a variable, manifest and shuffled channels",
        (
            """from sagemaker.inputs import TrainingInput, ShuffleConfig
from sagemaker.huggingface import HuggingFace
import sagemaker

sagemaker_session = sagemaker.Session()
torchrun = {"torch_distributed": {"enabled": True}}
channels = {
    "train": TrainingInput("s3://corpus/t", distribution="ShardedByS3Key", shuffle_config=ShuffleConfig(7)),
    "list": TrainingInput(s3_data="s3://corpus/list.json", s3_data_type="ManifestFile", content_type="application/json"),
}
est = HuggingFace(py_version="py311", entry_point="train.py", source_dir="scripts", transformers_version="4.49.0",
                  pytorch_version="2.5.1", role=sagemaker.get_execution_role(sagemaker_session), distribution=torchrun,
                  instance_type="ml.p4d.24xlarge", instance_count=2, sagemaker_session=sagemaker_session)
est.fit(channels, logs="None")
status = est.latest_training_job.describe()["TrainingJobStatus"] if False else None
""",
        ),
        (
            {
                "type": "ml.p4d.24xlarge",
                "count": 2,
                "image": "huggingface-pytorch-training:2.5.1-transformers4.49.0",
                "channels": {"train": "s3://corpus/t ShardedByS3Key", "list": "s3://corpus/list.json ManifestFile"},
                "strategy": "torchrun",
            },
        ),
        ("latest_training_job.describe() is refresh() in SDK v3",),
    ),
    Cell(
        "version 2 of the library, torch_distributed without MPI",
        (
            """import sagemaker
from sagemaker.pytorch import PyTorch

shards = 8
est = PyTorch(
    entry_point="train.py",
    source_dir="scripts",
    role=sagemaker.get_execution_role(),
    framework_version="2.2.0",
    py_version="py310",
    instance_type="ml.p4d.24xlarge",
    instance_count=2,
    distribution={
        "torch_distributed": {"enabled": True},
        "smdistributed": {
            "modelparallel": {
                "enabled": True,
                "parameters": {"hybrid_shard_degree": shards, "sm_activation_offloading": True},
            }
        },
    },
)
est.fit({"train": "s3://corpus/llama"})
""",
        ),
        (
            {
                "type": "ml.p4d.24xlarge",
                "count": 2,
                "channels": {"train": "s3://corpus/llama"},
                "strategy": "modelparallel 2 hybrid_shard_degree=8 sm_activation_offloading=True",
                "image": "smdistributed-modelparallel:2.2.0-gpu-py310-cu121",
            },
        ),
        ("this is version 2 of the model parallel library (torch.sagemaker)",),
    ),
    Cell(
        "version 2 of the library by a variable, file system channels in a dictionary",
        (
            """import sagemaker
from sagemaker.inputs import FileSystemInput
from sagemaker.pytorch import PyTorch

def fsx(path):
    return FileSystemInput("fs-0123456789abcdef0", "EFS", path, file_system_access_mode="rw")

smp_v2 = {
    "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"hybrid_shard_degree": 4}}},
    "torch_distributed": {"enabled": True},
}
est = PyTorch(
    entry_point="train.py",
    source_dir="scripts",
    role=sagemaker.get_execution_role(),
    image_uri="123456789012.dkr.ecr.us-east-1.amazonaws.com/fsdp:2",
    py_version="py310",
    instance_type="ml.p4d.24xlarge",
    instance_count=1,
    distribution=smp_v2,
    subnets=["subnet-1"],
    security_group_ids=["sg-1"],
)
est.fit({"train": fsx("/data/train"), "test": fsx("/data/test")})
""",
        ),
        (
            {
                "type": "ml.p4d.24xlarge",
                "image": "fsdp:2",
                "subnets": ["subnet-1"],
                "groups": ["sg-1"],
                "channels": {
                    "train": "fs-0123456789abcdef0 EFS /data/train rw",
                    "test": "fs-0123456789abcdef0 EFS /data/test rw",
                },
                "strategy": "modelparallel 2 hybrid_shard_degree=4",
            },
        ),
        ("this is version 2 of the model parallel library",),
    ),
    Cell(
        "DDP by mpirun, an experiment, tags in a variable",
        (
            """import sagemaker.pytorch
from sagemaker.utils import name_from_base

labels = [{"Key": "team", "Value": "nlp"}, {"Key": "cost", "Value": "42"}]
est = sagemaker.pytorch.PyTorch(
    entry_point="train.py",
    source_dir="scripts",
    role=sagemaker.get_execution_role(),
    framework_version="1.13.1",
    py_version="py39",
    instance_type="ml.p4d.24xlarge",
    instance_count=2,
    tags=labels,
    distribution={"pytorchddp": {"enabled": True, "custom_mpi_options": "-verbose"}},
    base_job_name=name_from_base("ddp"),
)
est.fit(inputs={"train": "s3://corpus/" + "ddp"}, experiment_config={"TrialName": "first"}, wait=False)
""",
        ),
        (
            {
                "type": "ml.p4d.24xlarge",
                "count": 2,
                "image": "pytorch-training:1.13.1-gpu-py39",
                "tags": {"team": "nlp", "cost": "42"},
                "channels": {"train": "s3://corpus/ddp"},
                "strategy": "torchrun",
            },
        ),
        ("pytorchddp started the ranks with mpirun", "fit(experiment_config="),
    ),
    Cell(
        "common arguments in a dictionary",
        (),
        (),
        ("its arguments come from common", "SDK v3 has no sagemaker.pytorch.PyTorch"),
        (
            """import sagemaker
from sagemaker.pytorch import PyTorch

common = dict(entry_point="train.py", source_dir="scripts", framework_version="2.1", py_version="py310", instance_count=1)
common["role"] = sagemaker.get_execution_role()
est = PyTorch(instance_type="ml.g5.xlarge", **common)
est.fit({"train": "s3://corpus/d"})
print(est.model_data)
""",
        ),
    ),
    Cell(
        "a subclass, a class in a variable, an attached job",
        (),
        (),
        (
            "PyTorch stays here: SDK v3 has ModelTrainer",
            "HuggingFace stays here: SDK v3 has ModelTrainer",
            "HuggingFace.attach is not in ModelTrainer",
            "sess.logs_for_job is not in SDK v3",
            "SDK v3 has no sagemaker.huggingface.HuggingFace",
            "SDK v3 has no sagemaker.pytorch.PyTorch",
        ),
        (
            """import sagemaker
from sagemaker.huggingface import HuggingFace
from sagemaker.pytorch import PyTorch

class Quiet(PyTorch):
    def logs(self):
        pass

sess = sagemaker.Session()
kind = HuggingFace
other = HuggingFace.attach("a-job-of-yesterday")
sess.logs_for_job(other.latest_training_job.name)
""",
        ),
    ),
    Cell(
        "an estimator as an attribute of an object, its name in a message",
        (
            """import sagemaker
from sagemaker.huggingface import HuggingFace


class Experiment:
    def __init__(self, size):
        self.role = sagemaker.get_execution_role()
        self.estimator = HuggingFace(
            entry_point="train.py",
            source_dir="scripts",
            role=self.role,
            instance_type="ml.g5.2xlarge" if size == "small" else "ml.p4d.24xlarge",
            instance_count=1,
            transformers_version="4.49.0",
            pytorch_version="2.5.1",
            py_version="py311",
            hyperparameters={**{"size": size}, "steps": 10},
        )

    def run(self, **channels):
        self.estimator.fit(channels, wait=False)
        return (
            f"started {self.estimator._current_job_name} "
            f"with {self.estimator.training_image_uri()}"
        )


experiment = Experiment("small")
print(experiment.run(train="s3://corpus/e"))
print(f"in {sagemaker.Session().boto_region_name}: " f"{experiment.estimator.latest_training_job.name}")
""",
        ),
        (
            {
                "type": "ml.g5.2xlarge",
                "image": "huggingface-pytorch-training:2.5.1-transformers4.49.0",
                "hyperparameters": {"size": "small", "steps": 10},
                "channels": {"train": "s3://corpus/e"},
            },
        ),
    ),
)
