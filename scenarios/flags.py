"""vLLM's flags: what each becomes in a scenario, or why it is left out.

The names are those of `vllm serve` 0.32 and of releases back to 0.6 that people still paste.
Every flag is in one of four places: an engine key of the scenario, read by name; HARMLESS, which
changes neither schedule, time nor memory; MATTERS, which does and is not modelled; or unknown.
"""

from servecast.scenarios.schema import Engine


def names_of(text: str) -> frozenset[str]:
    """Names parted by blanks."""
    return frozenset(text.split())


#: Short forms, and other names for the same.
SAME = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "dpl": "data_parallel_size_local",
    "dcp": "decode_context_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "ep": "enable_expert_parallel",
    "q": "quantization",
    "cc": "compilation_config",
    "sc": "speculative_config",
    "ac": "attention_config",
    "n": "nnodes",
    "r": "node_rank",
    "O": "optimization_level",
    "device_memory_utilization": "gpu_memory_utilization",
    "model_tag": "model",
}

#: Flags of vLLM that are keys of `engine` under the same name.
MAPPED = frozenset(Engine.model_fields) - {
    # Ours alone.
    "adaptive",
    "batch_wait_s",
    "batching",
    "boot_log",
    "estimate_cudagraphs",
    "kv",
    "kv_reserve",
    "vllm_use_v1",
    "vllm_version",
    # Read by name, below.
    "data_parallel_size",
    "generation_config",
    "hf_overrides",
    "speculative_config",
}

#: Short flags for keys of --speculative-config.
SPECULATIVE = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}

#: Flags that are read, and become something else than an engine key of their own name.
READ = {
    "compilation_config": "capture sizes and whether there are CUDA graphs",
    "config": "a file of flags, under those of the line",
    "cuda_graph_sizes": "cudagraph_capture_sizes; a single number is the largest",
    "data_parallel_size": "replicas, and engines over which experts are spread",
    "generation_config": "engine.generation_config, where it is no folder",
    "hf_overrides": "engine.hf_overrides, keys of the model's config.json",
    "limit_mm_per_prompt": "language_model_only, where every limit is 0",
    "max_cudagraph_capture_size": "cudagraph_capture_sizes",
    "model": "model",
    "optimization_level": "enforce_eager, where it is 0",
    "rope_scaling": "engine.hf_overrides.rope_scaling",
    "rope_theta": "engine.hf_overrides.rope_theta",
    **{short: f"engine.speculative_config.{key}" for short, key in SPECULATIVE.items()},
    "speculative_config": "engine.speculative_config, with what of it is modelled",
}

#: Flags that take no value.
SWITCHES = names_of(
    """
    disable_logprobs_during_spec_decoding enable_bf16x3_router_gemm
    enable_mamba_fine_grained_prefix_cache eplb_log_balancedness
    guided_decoding_disable_additional_properties guided_decoding_disable_any_whitespace
    guided_decoding_disable_fallback speculative_disable_mqa_scorer
    aggregate_engine_logging allow_credentials allow_deprecated_quantization
    calculate_kv_scales data_parallel_external_lb data_parallel_hybrid_lb
    data_parallel_multi_port_external_lb dcp_q_replicate disable_access_log_for_endpoints
    disable_async_output_proc disable_cascade_attn disable_chunked_mm_input
    disable_custom_all_reduce disable_fastapi_docs disable_frontend_multiprocessing
    disable_hybrid_kv_cache_manager disable_log_requests disable_log_stats
    disable_mm_preprocessor_cache disable_nccl_for_dp_synchronization disable_sliding_window
    disable_uvicorn_access_log enable_auto_tool_choice enable_batch_sharded_sampling
    enable_cumem_allocator enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb
    enable_expert_parallel enable_fault_tolerance enable_flashinfer_autotune
    enable_force_include_usage enable_layerwise_nvtx_tracing enable_log_outputs
    enable_log_requests enable_logging_iteration_details enable_lora enable_lora_bias
    enable_mamba_cache_stochastic_rounding enable_mfu_metrics enable_mm_embeds
    enable_moe_shared_loras enable_multimodal_encoder_data_parallel enable_prompt_adapter
    enable_prompt_embeds enable_prompt_tokens_details enable_reasoning
    enable_request_id_headers enable_return_routed_experts enable_server_load_tracking
    enable_shm_tensor_arena enable_sleep_mode enable_ssl_refresh
    enable_tokenizer_info_endpoint enable_trace_replay enable_tower_connector_lora
    exclude_tools_when_tool_choice_none fail_on_environ_validation fully_sharded_loras
    generate_from_hf headless interleave_mm_strings kv_cache_metrics kv_sharing_fast_prefill
    log_error_stack mm_encoder_only multi_step_stream_outputs numa_bind
    ray_workers_use_nsight return_sampling_mask return_tokens_as_token_ids skip_mm_profiling
    skip_tokenizer_init specialize_active_lora swa_bounded_replay tokens_only
    trust_remote_code trust_request_chat_template use_fp64_gumbel use_replayssm enable_hc_sp
    enable_mamba_shared_prefix_checkpoint enable_mixed_moe_lora_format
    enable_nccl_comm_suspend jit_monitor_verbose long_prefill_token_threshold_adaptive
    mm_device_do_normalize sleep_mode_offload_cudagraph use_tqdm_on_load
    use_v2_block_manager cudagraph_metrics enable_offline_docs worker_use_ray grpc
    """
)

#: Flags whose values go on until the next flag.
MANY = names_of(
    """
    allowed_headers allowed_media_domains allowed_methods allowed_origins api_key
    collect_detailed_traces cpu_offload_params cuda_graph_sizes
    cudagraph_capture_sizes ignore_patterns
    kv_cache_dtype_skip_layers logits_processors lora_modules lora_target_modules middleware
    numa_bind_cpus numa_bind_nodes offload_params prompt_adapters served_model_name
    sleep_preserve_parameter_names
    """
)

#: Flags whose value is JSON, of which single keys may be given as `--flag.key value`.
JSON_FLAGS = names_of(
    """
    additional_config attention_config compilation_config default_chat_template_kwargs
    diffusion_config ec_transfer_config eplb_config hf_overrides ir_op_priority
    kernel_config kv_events_config kv_transfer_config limit_mm_per_prompt logging_config
    media_io_kwargs mm_processor_kwargs model_loader_extra_config override_generation_config
    override_neuron_config override_pooler_config pooler_config profiler_config
    quantization_config reasoning_config rope_scaling speculative_config structured_outputs_config
    weight_transfer_config
    """
)

#: What changes neither schedule, time nor memory, by why.
HARMLESS = {
    "where it listens and who may ask": """
        allow_credentials allowed_headers allowed_methods allowed_origins api_key
        api_server_count disable_fastapi_docs disable_frontend_multiprocessing
        enable_offline_docs enable_request_id_headers enable_ssl_refresh grpc
        h11_max_header_count h11_max_incomplete_event_size headless host middleware port
        root_path ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers ssl_keyfile uds
        """,
    "what it logs and measures": """
        aggregate_engine_logging collect_detailed_traces cudagraph_metrics
        custom_histogram_buckets disable_access_log_for_endpoints disable_log_requests
        disable_log_stats disable_uvicorn_access_log enable_layerwise_nvtx_tracing
        enable_log_deltas enable_log_outputs enable_log_requests
        enable_logging_iteration_details enable_mfu_metrics enable_server_load_tracking
        jit_monitor_mode jit_monitor_verbose kv_cache_metrics kv_cache_metrics_sample
        kv_events_config log_config_file log_error_stack log_level logging_config max_log_len
        otlp_traces_endpoint per_request_spec_decode_metrics profiler_config
        ray_workers_use_nsight show_hidden_metrics_for_version uvicorn_log_level
        """,
    "where weights and tokenizer come from, and how they are loaded": """
        allowed_local_media_path allowed_media_domains code_revision config_format convert
        download_dir hf_config_path hf_token ignore_patterns load_format
        max_parallel_loading_workers model_class_overrides model_impl
        model_loader_extra_config pt_load_map_location revision safetensors_load_strategy
        safetensors_prefetch_block_size safetensors_prefetch_num_threads tokenizer
        tokenizer_mode tokenizer_revision trust_remote_code use_tqdm_on_load runner task
        weight_transfer_config allow_deprecated_quantization skip_tokenizer_init
        """,
    "how prompts and answers are worded": """
        chat_template chat_template_content_format default_chat_template_kwargs
        enable_auto_tool_choice enable_force_include_usage enable_prompt_tokens_details
        enable_reasoning enable_tokenizer_info_endpoint
        exclude_tools_when_tool_choice_none guided_decoding_backend
        reasoning_config reasoning_parser reasoning_parser_plugin
        response_role return_tokens_as_token_ids served_model_name
        structured_outputs_config tokens_only tool_call_parser tool_parser_plugin
        tool_server trust_request_chat_template seed max_logprobs logprobs_mode
        io_processor_plugin guided_decoding_disable_additional_properties
        guided_decoding_disable_any_whitespace guided_decoding_disable_fallback
        logits_processor_pattern
        """,
    "how processes find each other": """
        cpu_distributed_timeout_seconds data_parallel_address data_parallel_backend
        data_parallel_rpc_port device_ids distributed_executor_backend
        distributed_timeout_seconds fail_on_environ_validation fault_tolerance_config
        master_addr master_port node_rank shutdown_timeout worker_cls worker_extension_cls
        worker_use_ray additional_config engine_use_ray enable_fault_tolerance
        """,
    "gone from vLLM, or the default now": """
        disable_async_output_proc num_scheduler_steps use_v2_block_manager device
        num_lookahead_slots max_seq_len_to_capture max_context_len_to_capture
        multi_step_stream_outputs tokenizer_pool_extra_config tokenizer_pool_size
        tokenizer_pool_type quantization_param_path
        """,
}

#: What changes something and is not modelled, by what it would change.
MATTERS = {
    "V0's speculative decoding; --speculative-config is simulated": """
        speculative_model num_speculative_tokens ngram_prompt_lookup_max
        speculative_draft_tensor_parallel_size
        ngram_prompt_lookup_min speculative_disable_by_batch_size
        speculative_disable_mqa_scorer speculative_max_model_len
        speculative_model_quantization spec_decoding_acceptance_method
        typical_acceptance_sampler_posterior_alpha
        typical_acceptance_sampler_posterior_threshold disable_logprobs_during_spec_decoding
        """,
    "adapters take memory beside the weights and time in every layer": """
        default_mm_loras enable_lora enable_lora_bias enable_mixed_moe_lora_format
        enable_moe_shared_loras enable_tower_connector_lora fully_sharded_loras lora_dtype
        lora_extra_vocab_size lora_modules lora_target_modules max_cpu_loras max_lora_rank
        max_loras max_lora_cls_labels specialize_active_lora enable_prompt_adapter
        prompt_adapters max_prompt_adapters max_prompt_adapter_token long_lora_scaling_factors
        """,
    "KV that moves to or from other engines takes time; each engine is simulated alone": """
        ec_manager_config ec_transfer_config kv_offloading_backend kv_offloading_size
        kv_transfer_config
        """,
    "experts are split over tensor-parallel ranks as if it were off": """
        all2all_backend data_parallel_external_lb data_parallel_hybrid_lb
        data_parallel_multi_port_external_lb data_parallel_rank data_parallel_size_local
        data_parallel_start_rank dbo_decode_token_threshold dbo_prefill_token_threshold
        elastic_ep_max_dp_size enable_dbo enable_elastic_ep enable_ep_weight_filter
        enable_eplb enable_expert_parallel eplb_config expert_placement_strategy ubatch_size
        disable_nccl_for_dp_synchronization dp_sync_interval num_redundant_experts
        eplb_log_balancedness eplb_step_interval eplb_window_size
        """,
    "contexts are not split over devices": """
        cp_kv_cache_interleave_size dcp_comm_backend dcp_kv_cache_interleave_size
        dcp_q_replicate decode_context_parallel_size prefill_context_parallel_size
        """,
    "it sets other flags: give these, as the start-up log prints them": "performance_mode",
    "links between nodes are priced like those inside one": "nnodes",
    "workload.sampling says how tokens are chosen": "override_generation_config",
    "images and other media are not simulated": """
        enable_multimodal_encoder_data_parallel
        disable_chunked_mm_input disable_mm_preprocessor_cache enable_mm_embeds
        interleave_mm_strings media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend
        mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
        mm_encoder_fp8_scale_save_path mm_shm_cache_max_object_size_mb mm_encoder_only
        mm_encoder_tp_mode
        mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb
        mm_processor_cache_type mm_processor_device mm_processor_kwargs mm_tensor_ipc
        skip_mm_profiling video_pruning_method video_pruning_rate
        """,
    "other kernels have other times; the profile's are taken": """
        attention_backend attention_config disable_cascade_attn disable_custom_all_reduce
        enable_flashinfer_autotune gdn_prefill_backend ir_op_priority kda_decode_backend
        kda_prefill_backend kernel_config linear_backend mamba_backend
        mamba_ssu_algorithm moe_backend quantization_config
        enable_bf16x3_router_gemm override_neuron_config
        sparse_indexer_topk_backend use_fp64_gumbel enable_batch_sharded_sampling
        """,
    "the KV pool is laid out by the defaults": """
        calculate_kv_scales disable_hybrid_kv_cache_manager disable_sliding_window
        kv_cache_dtype_skip_layers kv_sharing_fast_prefill mamba_block_size
        mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype prefix_cache_retention_interval
        prefix_caching_hash_algo prefix_match_unit replayssm_buffer_len swa_bounded_replay
        use_replayssm engram_config enable_mamba_fine_grained_prefix_cache
        """,
    "the scheduler has no such rule": """
        long_prefill_token_threshold_adaptive max_long_partial_prefills max_num_active_seqs
        max_num_partial_prefills max_num_queued_reqs max_num_queued_tokens
        max_num_scheduled_tokens prefill_schedule_interval scheduler_cls scheduler_delay_factor
        stream_interval
        """,
    "memory and time of these are not counted": """
        aux_output_config enable_mamba_cache_stochastic_rounding
        enable_mamba_shared_prefix_checkpoint enable_nccl_comm_suspend enable_sleep_mode
        enable_trace_replay mamba_cache_philox_rounds numa_bind_cpus numa_bind_nodes
        sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator
        enable_shm_tensor_arena enable_hc_sp offload_backend offload_group_size
        offload_num_in_group offload_params offload_prefetch_step cpu_offload_params
        enable_prompt_embeds enable_return_routed_experts logits_processors
        numa_bind override_pooler_config pooler_config renderer_num_workers
        return_sampling_mask watermark_config diffusion_config
        """,
}


def _by_name(table: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in table.items() for name in names.split()}


WHY_HARMLESS = _by_name(HARMLESS)
WHY_MATTERS = _by_name(MATTERS)

#: Every long name, without the `no_` of a switch.
KNOWN = MAPPED | READ.keys() | WHY_HARMLESS.keys() | WHY_MATTERS.keys()


def canonical(flag: str) -> str:
    """The name of a flag without dashes, under its long form.

    >>> canonical("--max-num-seqs"), canonical("-tp")
    ('max_num_seqs', 'tensor_parallel_size')
    """
    name = flag.lstrip("-").replace("-", "_")
    return SAME.get(name, name)


def full_name(name: str) -> str:
    """The one known flag that a name abbreviates; the name itself where none or several do.

    >>> full_name("kv_cache_memory"), full_name("max")
    ('kv_cache_memory_bytes', 'max')
    """
    if not name or name in KNOWN:
        return name
    longer = [known for known in KNOWN if known.startswith(name)]
    return longer[0] if len(longer) == 1 else name


def is_switch(name: str) -> bool:
    """The flag takes no value."""
    if name in Engine.model_fields:
        return "bool" in str(Engine.model_fields[name].annotation)
    return name in SWITCHES


def understood() -> str:
    """The flags by what becomes of them, for `servecast init --help`."""
    lines = [f"Engine keys: {', '.join(sorted(_dashed(MAPPED)))}."]
    lines += [f"--{_dash(name)}: {what}." for name, what in READ.items()]
    lines += [
        f"No effect ({why}): {', '.join(sorted(_dashed(names.split())))}."
        for why, names in HARMLESS.items()
    ]
    lines += [
        f"Not modelled ({why}): {', '.join(sorted(_dashed(names.split())))}."
        for why, names in MATTERS.items()
    ]
    return "\n\n".join(lines)


def _dash(name: str) -> str:
    return name.replace("_", "-")


def _dashed(names: "frozenset[str] | list[str]") -> list[str]:
    return [_dash(name) for name in names]
