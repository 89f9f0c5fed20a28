"""Types of ``strategies.py``; written by ``tests/support/documents/stubs.py``."""

from typing import Any, Literal

class ModelParallel(dict[str, Any]):
    def __init__(
        self,
        *,
        pipeline_parallel_degree: int = 1,
        tensor_parallel_degree: int = 1,
        expert_parallel_degree: int = 1,
        sharded_data_parallel_degree: int = 1,
        context_parallel_degree: int = 1,
        context_parallel: Literal["auto", "ring", "all_gather", "all_to_all"] = "auto",
        microbatches: int = 1,
        active_microbatches: int | None = None,
        virtual_stages: int = 1,
        pipeline: Literal["interleaved", "zero_bubble", "simple", "_only_forward"] = "interleaved",
        compile: bool = False,
        compile_backend: str = "inductor",
        optimize: Literal["memory", "speed"] = "memory",
        memory_weight: float | None = None,
        placement_strategy: str = "cluster",
        auto_partition: bool = True,
        default_partition: int | None = None,
        ddp: bool = False,
        ddp_dist_backend: Literal["auto", "nccl", "smddp", "gloo"] = "auto",
        host_collectives: bool | None = None,
        ddp_port: int | None = None,
        prescaled_batch: bool = False,
        shard_optimizer_state: bool = False,
        fp16: bool = False,
        bf16: bool = False,
        fp8: bool = False,
        fp16_params: bool = False,
        offload_activations: bool = False,
        activation_loading_horizon: int = 4,
        delayed_parameter_initialization: bool = False,
        skip_tracing: bool = False,
        deterministic_server: bool = False,
        deterministic: bool = False,
        record_numerics: int = 0,
        check_invariants: bool = True,
        sdp_reduce_bucket_size: float = 500000000,
        sdp_param_persistence_threshold: float = 1000000,
        sdp_max_live_parameters: float = 1000000000,
        sdp_hierarchical_allgather: bool = True,
        sdp_gradient_clipping: float = 1.0,
        contiguous: bool = True,
        horovod: bool = False,
        load_partition: bool = False,
        partition_file: str | None = None,
        fast_mode: bool = True,
        step_program: bool = False,
        static_mode: bool = False,
        checkpoint_attentions: bool = False,
        overlapping_allreduce: bool = True,
        tracing_rank: int | None = None,
        match_weights: bool = False,
        fp32_grad_accumulation: bool = False,
    ) -> None:
        """Turn the model parallel library on.

        Args:
            pipeline_parallel_degree: Stages a model replica is split into (old name: partitions).
            tensor_parallel_degree: Processes that share each distributed layer; above 1 needs ddp.
            expert_parallel_degree: Processes that share whole experts of a mixture out: all of a tensor parallel group; 1
                splits each expert.
            sharded_data_parallel_degree: Processes that share parameters, gradients and optimizer state; 1 turns sharding off.
            context_parallel_degree: Processes that share each sequence out, and read the same batch; above 1 needs ddp.
            context_parallel: How keys and values travel in attention; auto: in the way that sends the fewest bytes.
            microbatches: Slices of a batch that run through the pipeline; 1 means none.
            active_microbatches: Most microbatches in flight at once; default: stages + 2, twice the stages with virtual_stages.
            virtual_stages: Pieces of the model that each pipeline stage owns: more idle less and send more.
            pipeline: interleaved: backward first; zero_bubble: likewise, gradients of weights where a stage would idle; simple:
                all forwards, then all backwards.
            compile: Compile the repeated blocks of each rank with torch.compile.
            compile_backend: The backend of torch.compile.
            optimize: Tensor parallelism: less activation memory, or less communication.
            memory_weight: Balance of memory (1) against time (0); default 0.2 for speed, else 0.8.
            placement_strategy: cluster (DPT), spread (TPD) or any permutation of D, P, T; right-most varies fastest.
            auto_partition: Split the model automatically.
            default_partition: Stage of modules outside every smp.partition; required when auto_partition is off.
            ddp: Data parallelism with gradient all-reduce.
            ddp_dist_backend: Collectives; auto: smddp if sharded over several ml.p4d.24xlarge, else nccl on GPUs, else gloo on
                CPUs.
            host_collectives: Ranks of one host reduce and gather through memory that they share, on CPUs; default: true in
                process mode, else false.
            ddp_port: Rendezvous port; default: a free one.
            prescaled_batch: Ranks of one tensor parallel group receive the same batch.
            shard_optimizer_state: Optimizer state sharded over the ranks that hold the same parameters.
            fp16: Train in float16 with fp32 master weights and loss scaling.
            bf16: Train in bfloat16 with fp32 master weights.
            fp8: Linear layers multiply numbers of 8 bits, with delayed scales; sharded weights are gathered in 8 bits.
            fp16_params: Initialise distributed modules in float16.
            offload_activations: Checkpointed activations wait in CPU memory.
            activation_loading_horizon: Pipeline tasks before its use at which an offloaded activation is loaded back.
            delayed_parameter_initialization: Parameters stay on the meta device until the model is partitioned.
            skip_tracing: Partition without the tracing step.
            deterministic_server: Same order of requests on all data parallel ranks.
            deterministic: Runs at the same degrees are equal in every bit; what prevents it is an error or a warning.
            record_numerics: Updates from one step recorded for smp-estimator diff to the next; 0: none.
            check_invariants: Compare copies of parameters after the first update and every 1,000, compare parts with the whole
                at wrapping, and look for NaN in the first steps.
            sdp_reduce_bucket_size: Elements per gradient bucket.
            sdp_param_persistence_threshold: Parameters with fewer elements stay replicated; 0 shards everything.
            sdp_max_live_parameters: Most gathered elements at once.
            sdp_hierarchical_allgather: All-gather in phases inside and between nodes.
            sdp_gradient_clipping: L2 norm to which the global gradient is clipped.
            contiguous: Accepted for old scripts: the automatic partition gives every stage neighbouring modules.
            horovod: Only false: Horovod belongs to TensorFlow.
            load_partition: Read the partition decision from partition_file.
            partition_file: File with a partition decision, read or written; relative: with the job's output and checkpoints.
            fast_mode: Calls of modules on other stages return at once, with results shaped as in earlier calls; false: each
                call waits for its result, which is slower, but models need it whose output shapes depend on values.
            step_program: Stages keep the requests of planned steps, and send each other only tensors while the model's calls
                stay the same.
            static_mode: Accepted for old scripts; recorded order is always replayed.
            checkpoint_attentions: Checkpoint the attentions of distributed layers.
            overlapping_allreduce: Reduce gradients while backward still runs.
            tracing_rank: Pipeline rank that traces the model; default 0.
            match_weights: Accepted for old scripts; distributed modules keep the original's weights.
            fp32_grad_accumulation: Accumulate half precision gradients in fp32.
        """

class MPI(dict[str, Any]):
    def __init__(self, processes_per_host: int | None = None, custom_mpi_options: str = "") -> None: ...
