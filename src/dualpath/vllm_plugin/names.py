"""Names by which vLLM finds our classes; importable without vLLM."""

CONNECTOR = "DualPathConnector"
CONNECTOR_MODULE = "dualpath.vllm_plugin.connector"
SCHEDULER_CLASS = "dualpath.vllm_plugin.quota_scheduler.QuotaScheduler"
WORKER_CLASS = "dualpath.vllm_plugin.layerwise_worker.LayerwiseWorker"

#: The only algorithm of vLLM whose keys all processes agree on (``core.blocks``).
HASH_ALGORITHM = "sha256_cbor"
