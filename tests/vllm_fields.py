"""How each field of vLLM's configuration affects the identity of KV, beside ``KV_FIELDS``."""

#: Fields of the parts that ``KV_FIELDS`` names, and of the weights' part, that are covered in
#: another way: as weights, effective configuration, layout, dtype or geometry of the namespace.
LOOKED_AT = {
    "model_config": {
        "code_revision", "dtype", "hf_config", "hf_text_config", "max_model_len", "model",
        "model_impl", "model_weights", "multimodal_config", "revision", "trust_remote_code",
    },
    "cache_config": {"block_size", "cache_dtype", "kv_cache_layout"},
    "attention_config": {"backend", "backend_per_kind"},
    "load_config": {"download_dir", "load_format"},
    "": {
        "additional_config", "attention_config", "cache_config", "engram_config", "load_config",
        "model_config", "speculative_config",
    },
}  # fmt: skip
#: Refused at start if set, or with more than one rank.
REFUSED = {"": {"diffusion_config", "parallel_config", "weight_transfer_config"}}
#: Fields that change KV only by rounding, or not at all.
NEUTRAL = {
    "model_config": {
        # Tokens, prompts and answers; keys are over token ids.
        "allowed_local_media_path", "allowed_media_domains", "enable_trace_replay",
        "generation_config", "io_processor_plugin", "logits_processors", "logprobs_mode",
        "max_logprobs", "override_generation_config", "return_sampling_mask", "seed",
        "served_model_name", "skip_tokenizer_init", "tokenizer", "tokenizer_mode",
        "tokenizer_revision", "use_fp64_gumbel", "renderer_num_workers",
        # How the configuration is found; its contents are part of the identity.
        "config_format", "hf_config_path", "hf_overrides", "hf_token",
        "allow_deprecated_quantization", "is_submodel_config",
        "word_embeddings_untied_by_checkpoint",
        # Rounding, memory, devices.
        "disable_cascade_attn", "enable_cumem_allocator", "enable_nccl_comm_suspend",
        "enable_sleep_mode", "enforce_eager", "sleep_mode_backend", "sleep_mode_offload_cudagraph",
        "sleep_preserve_parameter_names",
        # Requests of these kinds are refused.
        "convert", "enable_prompt_embeds", "pooler_config", "runner",
        # Of a draft model.
        "spec_target_max_model_len",
    },
    "cache_config": {
        # How much and how found.
        "cache_hit_alignment_tokens", "effective_attention_block_size", "enable_prefix_caching",
        "gpu_memory_utilization", "hash_block_size", "is_attention_free",
        "kv_cache_max_concurrency", "kv_cache_memory_bytes", "kv_cache_size_tokens",
        "kv_offloading_backend", "kv_offloading_size", "num_cpu_blocks", "num_gpu_blocks",
        "num_gpu_blocks_override", "prefix_cache_retention_interval",
        "prefix_caching_hash_algo", "prefix_match_unit", "user_specified_block_size",
        "_block_size_resolved", "skip_page_size_padded",
        # Of the model's configuration.
        "sliding_window",
        # Mamba: more than one KV cache group is refused.
        "enable_mamba_shared_prefix_checkpoint", "mamba_block_size", "mamba_cache_dtype",
        "mamba_cache_mode", "mamba_page_size_padded", "mamba_ssm_cache_dtype",
        "replayssm_buffer_len", "use_kda_recoverssm", "use_replayssm",
    },
    "attention_config": {
        # Which kernel, how split; queries in fewer bits.
        "disable_flashinfer_q_quantization", "flash_attn_max_num_splits_for_cuda_graph",
        "flash_attn_version", "flex_attn_block_m", "flex_attn_block_n", "flex_attn_kv_block_size",
        "flex_attn_q_block_size", "indexer_sparse_logits", "minimax_m3_msa_decode_backend",
        "mla_prefill_backend", "sparse_mla_force_mqa", "sparse_mla_prefill_workspace_factor",
        "tokenspeed_mla_min_split_kv", "tq_max_kv_splits_for_cuda_graph",
        "use_prefill_query_quantization", "use_trtllm_attention",
    },
    "load_config": {
        "device", "ignore_patterns", "model_loader_extra_config", "pt_load_map_location",
        "safetensors_load_strategy", "safetensors_prefetch_block_size",
        "safetensors_prefetch_num_threads", "use_tqdm_on_load",
    },
    "": {
        "aux_output_config", "compilation_config", "device_config", "ec_manager_config",
        "ec_transfer_config", "instance_id", "kernel_config", "kv_events_config",
        "kv_transfer_config", "logging_config", "lora_config", "mamba_config",
        "observability_config", "offload_config", "optimization_level", "performance_mode",
        "profiler_config", "quant_config", "reasoning_config", "scheduler_config",
        "shutdown_timeout", "structured_outputs_config", "watermark_config",
    },
}  # fmt: skip
#: The same, of fields that vLLM 0.33 adds: a watchdog, the size of another connector's store, and
#: kernels that differ in how work is split or, for queries in fewer bits, by rounding.
NEUTRAL_LATER = {
    "attention_config": {
        "indexer_tp_shard_min_rows", "minimax_m3_indexer_cp", "trtllm_ragged_backend",
    },
    "cache_config": {"simple_cpu_offload_num_blocks"},
    "": {"watchdog_config"},
}  # fmt: skip
