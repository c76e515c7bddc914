"""vLLM's MooncakeStoreConnector for the CPU platform.

vLLM loads it through ``kv_connector_module_path``; it is imported only in the peer's environment.
Three things differ from vLLM's connector:

* Before storing, vLLM waits for a CUDA event, which torch without CUDA cannot create.  On a CPU the
  forward pass is complete when a connector is asked to store, so no wait is needed.
* vLLM reads Mooncake's settings from a file; the environment has its path.  Here they are
  ``store`` of ``kv_connector_extra_config``, and this connector writes the file.
* It reports no statistics: MultiConnector looks up the class that aggregates them by name among
  vLLM's connectors, does not find this one, and the API server would end.
"""

import json
import os
import tempfile
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import (
    MooncakeStoreConnector,
)


class CPUMooncakeStoreConnector(MooncakeStoreConnector):
    """The connector without CUDA."""

    def __init__(self, vllm_config: Any, *rest: Any, **named: Any) -> None:  # noqa: ANN401
        settings = vllm_config.kv_transfer_config.kv_connector_extra_config["store"]
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            json.dump(settings, file)
        os.environ["MOONCAKE_CONFIG_PATH"] = file.name
        try:
            super().__init__(vllm_config, *rest, **named)
        finally:
            os.unlink(file.name)

    def wait_for_save(self) -> None:
        """Pass the KV of this step to the storing thread."""
        worker = self.connector_worker
        if worker.kv_send_thread is None:
            return
        for request in self._get_connector_metadata().requests:
            if request.can_save:
                worker.kv_send_thread.add_request(request)

    def get_kv_connector_stats(self) -> None:
        """Report nothing."""
