"""Configurations that people write and that work, each with the warnings that it deserves.

They are made as :mod:`support.faults.configurations` says.
"""

from __future__ import annotations

from typing import Any

from support.faults.configurations import ONE, P3, Probe, options, smp, without


def _variables() -> dict[str, Any]:
    from sagemaker.workflow.parameters import ParameterInteger, ParameterString

    made = smp(ParameterInteger("Processes", 8), ddp=True)
    made["distribution"]["mpi"]["custom_mpi_options"] = ParameterString("Options", "-x A=1")
    return {
        **made,
        "hyperparameters": {"steps": ParameterInteger("Steps", 10)},
        "instance_count": ParameterInteger("Hosts", 2),
        "instance_type": ParameterString("Type", "ml.p4d.24xlarge"),
    }


def _all_parameters_as_variable() -> dict[str, Any]:
    from sagemaker.workflow.parameters import ParameterString

    made = smp()
    made["distribution"]["smdistributed"]["modelparallel"]["parameters"] = ParameterString(
        "Parameters", '{"ddp": true}'
    )
    return made


RIGHT = [
    Probe("seed: tensor parallelism", smp(8, tensor_parallel_degree=4, ddp=True)),
    Probe("seed: pipeline", smp(8, partitions=4, microbatches=8, pipeline="interleaved", optimize="speed", ddp=True)),
    Probe(
        "seed: sharding over 32",
        {**smp(8, sharded_data_parallel_degree=32, ddp=True, bf16=True), "instance_count": 4},
    ),
    Probe(
        "seed: sharding with tensor parallelism",
        {
            **smp(
                8, tensor_parallel_degree=4, sharded_data_parallel_degree=4, ddp=True, prescaled_batch=True, fp16=True
            ),
            "instance_count": 4,
        },
    ),
    Probe("sequences over four", smp(8, context_parallel_degree=4, context_parallel="ring", ddp=True)),
    Probe(
        "sequences, stages and layers",
        smp(8, context_parallel_degree=2, partitions=2, tensor_parallel_degree=2, prescaled_batch=True, ddp=True),
    ),
    Probe("pipeline with sharding", smp(8, partitions=2, sharded_data_parallel_degree=8, ddp=True)),
    Probe("pipeline with optimizer sharding", smp(8, partitions=2, shard_optimizer_state=True, ddp=True)),
    *(
        Probe(
            f"placement {name}",
            smp(8, partitions=2, tensor_parallel_degree=2, ddp=True, placement_strategy=name),
            (),
            said,
        )
        for name, said in {
            "cluster": (),
            "spread": (r"spread over 2 hosts",),
            "DPT": (),
            "DTP": (),
            "PDT": (),
            "PTD": (),
            "TDP": (r"spread over 2 hosts",),
            "TPD": (r"spread over 2 hosts of 8 processes.*ends with T",),
        }.items()
    ),
    Probe("p5", {**smp(8, ddp=True), "instance_type": "ml.p5.48xlarge"}),
    Probe("p5en", {**smp(8, ddp=True), "instance_type": "ml.p5en.48xlarge"}),
    Probe("p6", {**smp(8, ddp=True), "instance_type": "ml.p6-b200.48xlarge"}),
    Probe("g6", {**smp(8, ddp=True), "instance_type": "ml.g6.48xlarge"}),
    Probe("many processes on a CPU instance", {**smp(12, ddp=True), "instance_type": "ml.c5.xlarge"}),
    Probe(
        "unknown GPU instance",
        {**smp(16, ddp=True), "instance_type": "ml.p9.96xlarge"},
        (),
        (r"not in this version's",),
    ),
    Probe("default partition, old name", smp(8, partitions=2, auto_partition=False, default_partition=1, ddp=True)),
    Probe(
        "default partition, new name",
        smp(8, pipeline_parallel_degree=2, auto_partition=False, default_partition=1, ddp=True),
    ),
    Probe("default partition alone", smp(8, default_partition=0, ddp=True)),
    Probe("both names, one value", smp(8, partitions=2, pipeline_parallel_degree=2, ddp=True)),
    Probe("no parameters at all", {**smp(1), **ONE, "instance_type": "ml.p3.2xlarge"}),
    Probe(
        "parameters left out", {**without("smdistributed", "modelparallel", "parameters"), **P3}, (), (r"ddp is false",)
    ),
    Probe(
        "tp over the host's edge", smp(8, tensor_parallel_degree=16, ddp=True), (), (r"spread over 2 hosts.*at most 8",)
    ),
    Probe(
        "CUDA 13 on V100",
        {
            **smp(8, ddp=True),
            **P3,
            "image_uri": "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker",
        },
        (),
        (r"has CUDA 13, .*no code for V100",),
    ),
    Probe("bf16 on V100", {**smp(8, ddp=True, bf16=True), **P3}, (), (r"V100 GPUs of ml\.p3\.16xlarge have no units",)),
    Probe(
        "optimizer sharding with a batch per rank",
        smp(8, ddp=True, tensor_parallel_degree=2, shard_optimizer_state=True),
    ),
    Probe("names of SDK v1", {**smp(8, ddp=True), "train_max_run": 500}, (), (r"train_max_run is the name of SDK v1",)),
    Probe("shared memory", {**smp(8, ddp=True, host_collectives=True), "instance_type": "ml.c5.18xlarge"}),
    Probe("NCCL by name", smp(8, ddp=True, ddp_dist_backend="nccl")),
    Probe("idle GPUs", smp(4, ddp=True), (), (r"4 of each host stay idle",)),
    Probe("scientific number", smp(8, ddp=True, sharded_data_parallel_degree=2, sdp_reduce_bucket_size=5e8)),
    Probe("older keys", smp(8, ddp=True, contiguous=True, horovod=False, fast_mode=False, _prescaled_batch=False)),
    Probe("default option repeated", options("--mca btl_vader_single_copy_mechanism none")),
    Probe("options of the seeds", options("-verbose -x NCCL_DEBUG=VERSION -x SMDDP_AG_SORT_BUFFER_SIZE_BYTES=8192")),
    Probe(
        "buffers in the environment",
        {**smp(8, ddp=True), "environment": {"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "8192"}},
    ),
    Probe("pipeline variables where they may stand", _variables),
    Probe("all parameters as a variable", _all_parameters_as_variable),
    Probe("library turned off", {**smp(8, enabled=False, ddp=True)}),
    Probe(
        "option of the stock image's launcher",
        {**options("--mca pml ob1"), "image_uri": None},
        (),
        (r"sets pml itself",),
    ),
    Probe("stock image", {**smp(8, ddp=True), "image_uri": None}),
    Probe(
        "stock image of a version",
        {**smp(8, ddp=True), "image_uri": None, "framework_version": "2.13", "py_version": "py312"},
    ),
    Probe(
        "stock image that is no longer patched",
        {**smp(8, ddp=True), "image_uri": None, "framework_version": "2.4", "py_version": "py311"},
        (),
        (r"PyTorch 2\.4\.0 .* patched until 2025-07-24.*leave framework_version out",),
    ),
    Probe(
        "stock image for V100",
        {**smp(8, ddp=True), "image_uri": None, "instance_type": "ml.p3.16xlarge"},
        (),
        (r"PyTorch 2\.8\.0 .* patched until 2026-08-06.*no stock image with code for V100 GPUs",),
    ),
    Probe(
        "image for EC2",
        {**smp(8, ddp=True), "image_uri": "public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023"},
        (),
        (r"the image for EC2, which has no training toolkit.*a tag with -sagemaker",),
    ),
    Probe(
        "old version with an image of one's own",
        {**smp(8, ddp=True), "framework_version": "1.13.1", "py_version": "py39"},
    ),
    Probe(
        "spot",
        {
            **smp(8, ddp=True),
            "use_spot_instances": True,
            "max_run": 3600,
            "max_wait": 7200,
            "checkpoint_s3_uri": "s3://bucket/checkpoints",
        },
    ),
    Probe(
        "spot without checkpoints",
        {**smp(8, ddp=True), "use_spot_instances": True, "max_run": 3600, "max_wait": 7200},
        (),
        (r"without checkpoint_s3_uri",),
    ),
    Probe("warm pool", {**smp(8, ddp=True), "keep_alive_period_in_seconds": 1800}),
    Probe("pytorchddp", {"distribution": {"pytorchddp": {"enabled": True}}, **P3}),
    Probe("torch_distributed", {"distribution": {"torch_distributed": {"enabled": True}}}),
    Probe("plain mpi", {"distribution": {"mpi": {"enabled": True, "processes_per_host": 8}}}),
    Probe("data parallel library", {"distribution": {"smdistributed": {"dataparallel": {"enabled": True}}}}),
    Probe("nothing", {}),
]
