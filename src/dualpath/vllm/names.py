"""Names by which vLLM finds our classes; importable without vLLM."""

#: The version of vLLM whose private parts ``hooks`` and the tests pin.
SUPPORTED_VLLM = "0.32.0"

#: Name of our entry point in ``vllm.general_plugins`` (``engine_arguments.register``).
PLUGIN = "dualpath"

CONNECTOR = "DualPathConnector"
CONNECTOR_MODULE = "dualpath.vllm.connector"
SCHEDULER_CLASS = "dualpath.vllm.quota_scheduler.QuotaScheduler"
WORKER_CLASS = "dualpath.vllm.layerwise_worker.LayerwiseWorker"

#: The only algorithm of vLLM whose keys all processes agree on (``core.blocks``).
HASH_ALGORITHM = "sha256_cbor"
