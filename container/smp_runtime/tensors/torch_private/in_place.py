"""Private names of PyTorch that other files use where they stand."""

from __future__ import annotations

from collections.abc import Mapping

_FUSED = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")

_ATTENTION = tuple(f"_scaled_dot_product_{kind}{way}" for kind in _FUSED for way in ("", "_backward"))

#: Private names that other files use directly, by their owner.
IN_PLACE: Mapping[str, tuple[str, ...]] = {
    # Contents of a module. named_parameters and similar methods read these dictionaries.
    "torch.nn.Module": (
        *("_parameters", "_buffers", "_modules"),
        *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
        # Overridden, as PyTorch's own modules do.
        *("_apply", "_load_from_state_dict"),
        # Put on an instance, so that they take its calls; names that a checkpointed function may have.
        *("_call_impl", "_compiled_call_impl", "_wrapped_call_impl"),
        # Replaced: it is called with the results that a hook of ``register_backward_hook`` watches.
        "_maybe_warn_non_full_backward_hook",
    ),
    # How often a tensor was changed in place, what a view is of, and what hangs on it.
    "torch.Tensor": ("_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks"),
    # One kernel for many tensors; torch.optim is written with these.
    "torch": ("_foreach_add_", "_foreach_mul_", "_foreach_copy_", "_foreach_clamp_min_", "_foreach_clamp_max_"),
    # Operators. Their names are part of the format of exported programs.
    "torch.ops.aten": ("_local_scalar_dense", "_embedding_bag", "_to_copy", "_fused_sdp_choice", *_ATTENTION),
    # Overridden, and asked whether it has begun.
    "torch.amp.GradScaler": (
        *("_unscale_grads_", "_maybe_opt_step", "_enabled", "_scale", "_lazy_init_scale_growth_tracker"),
    ),
    # Overridden: names of before PyTorch 2.13.
    "torch.distributed.ProcessGroup": ("_allgather_base", "_reduce_scatter_base"),
    "torch.utils.checkpoint": ("_CheckpointFrame",),  # keeps the inputs of a checkpointed function
    "torch.distributed.fsdp.FullyShardedDataParallel": ("_optim_state_dict_impl",),  # wrong on a CPU: replaced
    # Replaced if gradients lie on several ranks. Before PyTorch 2.6, the function that the public one wraps is replaced.
    "torch.nn.utils.clip_grad": ("_get_total_norm", "_clip_grads_with_norm_"),
}
