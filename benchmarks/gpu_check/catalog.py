"""The checks: their order, time limits and questions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """A check, which runs in a process of its own.

    Attributes:
        name: its name on the command line; ``check_NAME`` is its function.
        module: the module of ``gpu_check.checks`` with its function.
        part: ``a`` (does it work?) or ``b`` (what does it cost?).
        seconds: its time limit.
        question: the question that it answers.
        trains_here: whether it trains in its own process, which may then use emulated devices. Otherwise its ranks do.
    """

    name: str
    module: str
    part: str
    seconds: int
    question: str
    trains_here: bool = False

    @property
    def is_alone(self) -> bool:
        """Return whether no other check may run at the same time, because it measures the machine, time or memory."""
        return self.part == "b" or self.module == "machine"

    def __str__(self) -> str:
        return f"{self.name:16} {self.seconds:4d} s  {'alone ' if self.is_alone else 'beside'}  {self.question}"


#: In the order in which they run: those that say most come first. Checks that are not alone run beside each other, before
#: the next one that is.
CHECKS = (
    # Does it start at all, and on which machine?
    Check("env", "machine", "a", 60, "software and hardware of the machine; measured ceilings"),
    Check("start_plain", "starting", "a", 90, "smp.init and a step by plain python"),
    Check("start_torchrun", "starting", "a", 90, "torchrun, one rank"),
    Check("start_launch", "starting", "a", 90, "smp-launch run, one rank and two"),
    Check("start_mpi", "starting", "a", 60, "mpi4py without mpirun; mpirun -n 2 if there is one"),
    Check("start_shared", "sharing", "a", 90, "two ranks share the GPU: backend, device, each kind of collective"),
    Check("nccl_shared", "sharing", "a", 90, "two ranks share the GPU over NCCL in plain PyTorch: is that possible?"),
    # Are the numbers right?
    Check("parity", "one_rank", "a", 150, "one rank against plain PyTorch: precision, clipping, optimizers, …", True),
    Check("matrix_dp", "matrices", "a", 150, "two ranks, one GPU: replicas, sharded state, fp16, bf16, compile"),
    Check("matrix_pp", "matrices", "a", 150, "two ranks, one GPU: pipelines, zero bubble, virtual stages, offloading"),
    Check("matrix_tp", "matrices", "a", 150, "two ranks, one GPU: tensor parallelism"),
    Check("matrix_sdp", "matrices", "a", 150, "two ranks, one GPU: sharded data parallelism"),
    Check("matrix_cp", "sequences", "a", 120, "two and four ranks, one GPU: context parallelism"),
    Check(
        "context_attention", "sequences", "a", 150, "attention of two ranks by mask, method and dtype; over NCCL too"
    ),
    Check("paths", "cuda_paths", "a", 240, "each path with code of its own for CUDA, on the GPU against the CPU"),
    Check(
        "sanitizer", "streams", "a", 120, "PyTorch's CUDA sanitizer on offloading, saving, tracking; a planted fault"
    ),
    Check("warm_fork", "failures", "a", 120, "does an import of libraries make forks unfit for CUDA?"),
    Check("matrix_four", "matrices", "a", 120, "four ranks, one GPU: pp × tp, sdp × tp"),
    Check("oom", "failures", "a", 60, "a batch that does not fit, then one that does: does training go on?", True),
    Check("failure", "failures", "a", 140, "a rank fails while the other waits on its GPU: how soon do all end?", True),
    Check("deterministic", "one_rank", "a", 60, "are two runs equal in every bit?", True),
    # What does it cost?
    Check("overhead", "costs", "b", 110, "degree 1 against plain PyTorch: time, host waits, launches, GPU busy", True),
    Check("mfu", "costs", "b", 120, "GPT of 1.3B in bf16: MFU, time and peak memory against plain PyTorch", True),
    Check("activations", "memory", "b", 130, "checkpointing and offloading against PyTorch's own: time and peak", True),
    Check("compile", "costs", "b", 130, "torch.compile of blocks: gain in both", True),
    Check("plan", "memory", "b", 60, "peak memory as plan and rehearsal predict it, against the measured one", True),
    Check("context_memory", "sequences", "b", 120, "peak of two ranks with twice the length against one rank"),
    Check("optimizer", "optimizers", "b", 60, "optimizer step against torch's own, fused and by default", True),
    Check("saving", "saving", "b", 80, "checkpoints against torch.save and torch.distributed.checkpoint", True),
    Check("fsdp2", "costs", "b", 70, "peer: FSDP2 at world size 1", True),
    # More.
    Check("nccl_matrix", "matrices", "b", 150, "two ranks, one GPU, with SMP_SHARED_GPU=nccl: dp, pp, sdp, tp"),
    Check(
        "attention", "client_models", "b", 60, "layers of smp.nn: which kernel attends, how often the host waits", True
    ),
    Check("hf", "client_models", "b", 90, "Transformers' Llama in bf16 with and without the library", True),
)
BY_NAME = {check.name: check for check in CHECKS}
