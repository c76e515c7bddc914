"""Which of a router's settings are the scheduler's and which the front ends', where they are apart.

Imports nothing, as commands name their flags by it.
"""

SCHEDULERS_OWN = (
    *("control_host", "control_port", "front_ends_port", "mode", "event_log"),
    *("standby_lock", "standby_lease", "lease_ca_file", "lease_cert_file", "lease_key_file"),
    *("lease_user", "lease_password_file"),
    *("engine_timeout_s", "suspect_timeout_s", "core_timeout_s", "lookup_timeout_s"),
    *("release_wait_s", "first_leg_timeout_s", "second_leg_timeout_s", "move_kv"),
    "exclusive_engine_ids",
    *("read_deadline_s", "read_margin_s", "recompute_limit_s", "alpha_tokens", "beta_tokens"),
    *("append_at_decode_tokens", "engine_groups", "handover", "third_engine_reads"),
    *("dram_tier", "prefetch_sessions", "retain_share"),
    *("rebalance", "rebalance_options", "role_switch_timeout_s"),
    *("front_ends", "units", "cluster_port"),
)
FRONT_ENDS_OWN = (
    *("call_silence_s", "inquiry_timeout_s"),
    *("engine_wait_s", "request_deadline_s", "drain_timeout_s", "max_attempts"),
    *("max_concurrent_requests", "max_waiting_requests", "tenant_weights"),
    *("max_prompt_tokens", "max_samples"),
    *("otlp_traces_endpoint", "front_ends", "units", "cluster_port"),
)
