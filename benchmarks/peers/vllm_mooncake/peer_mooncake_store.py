"""vLLM's MooncakeStoreConnector for its CPU platform.

Found by vLLM through ``kv_connector_module_path``; imported in the peer's environment only.  Three
things are other than shipped, everything else is vLLM's and Mooncake's:

* Before it stores, vLLM waits for an event of CUDA, which a torch without CUDA cannot make.  On a
  CPU the forward pass is over when a connector is asked to store, so there is nothing to wait for.
* vLLM reads Mooncake's settings from a file whose path is in the environment.  Here they are
  ``store`` of ``kv_connector_extra_config``, and this writes the file.
* It reports no statistics: MultiConnector looks for the class that adds them up by its name among
  vLLM's own connectors, does not find this one, and the API server ends.
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
        """Hand what this step has computed to the thread that stores it."""
        worker = self.connector_worker
        if worker.kv_send_thread is None:
            return
        for request in self._get_connector_metadata().requests:
            if request.can_save:
                worker.kv_send_thread.add_request(request)

    def get_kv_connector_stats(self) -> None:
        """Report nothing."""
