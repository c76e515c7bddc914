"""vLLM PD over NIXL, with vLLM's offloading to a file system tier on every prefill node."""

from dualpath_lab.benchmarks.peers.peer_stack import (
    PeerSettings,
    both,
    engine,
    nixl_connector,
    proxy,
)
from dualpath_lab.nodes.node_processes import NodeCommand


class OffloadingStack:
    """Only the PE reads storage, through a tier in DRAM, without further processes."""

    name = "vllm-nixl-offloading"

    def commands(self, settings: PeerSettings) -> list[NodeCommand]:
        """Return engines and the proxy."""
        offloading = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CPUTieringOffloadingSpec",
                "spec_module_path": "vllm_offloading.peer_cpu_offloading",
                "block_size": settings.chunk_tokens,
                "cpu_bytes_to_use": settings.dram_bytes,
                "offload_prompt_only": False,
                "secondary_tiers": [
                    {
                        "type": "fs",
                        "root_dir": f"{settings.storage}/offloading",
                        "n_read_threads": settings.readers,
                        "n_write_threads": 2,
                    }
                ],
            },
        }
        storing = offloading if settings.aggregated else both(nixl_connector(), offloading)
        return [
            *(engine(settings, node, storing) for node in settings.storing),
            *(engine(settings, node, nixl_connector()) for node in settings.forwarding),
            proxy(settings),
        ]
