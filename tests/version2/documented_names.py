"""The public names of version 2, with their signatures: from public documents, and from client scripts where those show more."""

from __future__ import annotations

_SAVE = (
    "state_dict, *, checkpoint_id=None, storage_writer=None, planner=None, process_group=None, coordinator_rank=0, "
    "wait_error_handling=True, force_check_all_plans=True, s3_region=None, s3client_config=None"
)
_ASYNC_SAVE = _SAVE.replace("coordinator_rank=0, ", "coordinator_rank=0, queue=QUEUE, sharded_strategy=STRATEGY, ")
_LOAD = (
    "state_dict, *, checkpoint_id=None, storage_reader=None, planner=None, process_group=None, check_keys_matched=True, "
    "coordinator_rank=0, s3_region=None, s3client_config=None"
)
_TRANSFORM = 'model, device=None, dtype=None, config=None, load_state_dict_from_rank0=False, cp_comm_type="p2p"'
_MOE = (
    'smp_moe=True, random_seed=12345, moe_load_balancing="sinkhorn", global_token_shuffle=False, '
    "moe_all_to_all_dispatcher=True, moe_aux_loss_coeff=0.001, moe_z_loss_coeff=0.001"
)
_FLASH = "attention_dropout_prob=0.0, scale=None"
_CHECKPOINT = "distributed.checkpoint"

#: Module of ``torch.sagemaker``, name and arguments of what is called; a value in capitals is any default.
SIGNATURES: list[tuple[str, str, str]] = [
    ("", "init", "config=None"),
    ("", "is_initialized", ""),
    ("", "transform", _TRANSFORM),
    ("delayed_param", "DelayedParamIniter", "model, init_method_using_config=None, verbose=False"),
    ("delayed_param", "DelayedParamIniter.get_param_init_fn", "self"),
    ("delayed_param", "DelayedParamIniter.get_post_param_init_fn", "self"),
    ("delayed_param", "DelayedParamIniter.count_num_params", "self, module, *args"),
    ("delayed_param", "DelayedParamIniter.validate_params_and_buffers_inited", "self, enabled=True"),
    ("utils.module_utils", "empty_module_params", "module, device=None, recurse=False"),
    ("utils.module_utils", "move_buffers_to_device", "module, device, recurse=False"),
    ("utils.process_group_utils", "get_global_ranks", "group"),
    ("utils.utils", "timeit", "enabled, label, rank=RANK"),
    ("grad_norm", "clip_grad_norm_", "model, max_norm"),
    ("logger", "get_logger", ""),
    ("moe.moe_config", "MoEConfig", _MOE),
    ("nn.attn", "FlashSelfAttention", f"{_FLASH}, triton_flash_attention=False, use_alibi=False"),
    (
        "nn.attn",
        "FlashSelfAttention.forward",
        'self, qkv, attn_mask=None, causal=False, cast_dtype=None, layout="b h s d"',
    ),
    ("nn.attn", "FlashGroupedQueryAttention", _FLASH),
    ("nn.attn", "FlashGroupedQueryAttention.forward", 'self, q, kv, causal=False, cast_dtype=None, layout="b s h d"'),
    ("nn.huggingface.llama_flashattn", "LlamaFlashAttention", "config"),
    (
        "nn.huggingface.llama_flashattn",
        "LlamaFlashAttention.forward",
        "self, hidden_states, attention_mask=MASK, position_ids=IDS, past_key_value=CACHE, output_attentions=OUTPUT, use_cache=USE",
    ),
    (f"{_CHECKPOINT}.state_dict_saver", "async_save", _ASYNC_SAVE),
    (f"{_CHECKPOINT}.state_dict_saver", "save", _SAVE),
    (f"{_CHECKPOINT}.state_dict_saver", "maybe_finalize_async_calls", "blocking=True, process_group=None"),
    (f"{_CHECKPOINT}.state_dict_loader", "load", _LOAD),
    (f"{_CHECKPOINT}.async_utils", "AsyncCallsQueue", ""),
    (
        f"{_CHECKPOINT}.async_utils",
        "AsyncCallsQueue.maybe_finalize_async_calls",
        "self, blocking=BLOCKING, process_group=None, skip_sync=False",
    ),
    (f"{_CHECKPOINT}.state_dict_utils", "sm_state_dict_type", "model, state_dict_type"),
    (f"{_CHECKPOINT}.state_dict_utils", "init_optim_state", "optimizer, skip_empty_param=SKIP"),
    (f"{_CHECKPOINT}.filesystem", "DistributedFileSystemReader", "path"),
    (f"{_CHECKPOINT}.filesystem", "DistributedFileSystemWriter", "path, pre_write_hooks=HOOKS, post_write_hooks=HOOKS"),
    (f"{_CHECKPOINT}.filesystem", "path_to_file_system", "path"),
    (f"{_CHECKPOINT}.s3_filesystem", "format_s3_path", "path"),
    (f"{_CHECKPOINT}.s3_filesystem", "is_s3_uri", "path"),
    (f"{_CHECKPOINT}.s3_filesystem", "retry_with_jitter", "function"),
    ("checkpoint.utils", "limit_num_subdirs", "dir, max_num_subdirs, sort_fn=SORT, regex=None, log=LOG"),
    ("context_parallel.utils", "setup_transformer_engine_cp_groups", "model, global_ranks, group"),
]

#: Names that are no functions of the scripts', by module.
OTHERS: list[tuple[str, str]] = [
    ("moe.moe_layer", "MoELayer"),
    ("tensor_parallel.transformer", "TransformerLayer"),
    ("tensor_parallel.transformer", "TETransformerLayer"),
    (f"{_CHECKPOINT}.state_dict_utils", "SMStateDictType"),
    (f"{_CHECKPOINT}.state_dict_saver", "PyTorchDistSaveShardedStrategy"),
    (f"{_CHECKPOINT}.s3_filesystem", "S3FileSystem"),
    ("checkpoint.utils", "SORT_BY_LAST_INT"),
    ("checkpoint.constants", "SMP_IS_LOAD_INFO_KEY"),
    ("checkpoint.constants", "SMP_IS_PARTIAL_KEY"),
]

#: Attributes of ``tsm.state``.
STATE = """
    hybrid_shard_degree rank rep_rank_process_group tensor_parallel_degree tp_size tp_rank tp_process_group world_size
    context_parallel_degree cp_size cp_rank cp_process_group expert_parallel_degree ep_size ep_rank world_process_group
    sm_activation_offloading get_rng_state_tracker ranker reset
""".split()

#: Arguments without effect; a note in the documents, and in the function's own documentation, says so.
NOTED = {
    "async_save.force_check_all_plans",
    "async_save.wait_error_handling",
    "load.coordinator_rank",
    "save.force_check_all_plans",
    "save.wait_error_handling",
}
