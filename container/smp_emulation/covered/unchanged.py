"""Public names of PyTorch's CUDA modules that need no device: they act as PyTorch made them."""

_EXCEPTION = "an exception class"
_OVER_AMP = "calls torch.amp, which is covered"
_SWITCH = "a switch that every build of PyTorch has"
_CLASS = "a class that is only named"
_QUESTION = "asks for kernels of a GPU; False for the CPU's tensors"
_TYPES = "the name for what torch.cuda.cudart() gives"

#: Why, by name.
UNCHANGED = {
    "torch.cuda.CudaError": _EXCEPTION,
    "torch.cuda.DeferredCudaCallError": _EXCEPTION,
    "torch.cuda.AcceleratorError": _EXCEPTION,
    "torch.cuda.OutOfMemoryError": _EXCEPTION,
    "torch.cuda.cudaStatus": _TYPES,
    "torch.cuda.has_half": "what the build has",
    "torch.cuda.has_magma": "what the build has",
    **{
        f"torch.cuda.graph_annotations.{name}": "tells of graphs, of which there are none"
        for name in (
            "clear_kernel_annotations",
            "dump_kernel_py_stacks",
            "get_kernel_annotations",
            "get_kernel_py_stacks",
            "mark_kernels",
        )
    },
    **{f"torch.cuda.amp.{name}": _OVER_AMP for name in ("GradScaler", "autocast", "custom_bwd", "custom_fwd")},
    **{
        f"torch.backends.cuda.{name}": _SWITCH
        for name in (
            "allow_fp16_bf16_reduction_math_sdp",
            "cudnn_sdp_enabled",
            "enable_cudnn_sdp",
            "enable_flash_sdp",
            "enable_math_sdp",
            "enable_mem_efficient_sdp",
            "flash_sdp_enabled",
            "fp16_bf16_reduction_math_sdp_allowed",
            "math_sdp_enabled",
            "matmul",
            "mem_efficient_sdp_enabled",
            "preferred_blas_library",
            "preferred_linalg_library",
            "preferred_rocm_fa_library",
            "sdp_kernel",
        )
    },
    **{
        f"torch.backends.cuda.{name}": _QUESTION
        for name in (
            "can_use_cudnn_attention",
            "can_use_efficient_attention",
            "can_use_flash_attention",
            "is_ck_sdpa_available",
            "is_flash_attention_available",
        )
    },
    **{
        f"torch.backends.cuda.{name}": _CLASS
        for name in (
            "SDPAParams",
            "cuBLASModule",
            "cuFFTPlanCache",
            "cuFFTPlanCacheAttrContextProp",
            "cuFFTPlanCacheManager",
        )
    },
}
