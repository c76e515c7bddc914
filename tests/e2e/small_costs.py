"""The model of emulated engines that run as processes, as a file of costs."""

COSTS = """
name = "small"
layers = 6
kv_bytes_per_token = 1536.0
prefill_tokens_per_s = 50000.0
[prefill]
batch_s = 0.002
attention_token_s = 1e-5
pair_s = 1e-8
[decode]
step_s = 0.002
"""
