"""What a cluster on one machine is made of."""

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.transport.ucx_config import check_engine_config

MIB = 1 << 20


class LocalClusterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of ``LocalCluster``; sizes in bytes are per engine.

    ``hbm_bytes`` KV memory of an engine; ``buffer_bytes`` its PE or DE buffer; ``layer_buffers``
    layers of KV in a PE's memory, 0 for all (always 0 in mode basic); ``snic_bytes_per_s``
    throttles the storage reads of every engine to emulate a node's storage NIC, 0 for none;
    ``nixl_engine_config`` are the UCX settings of every engine's NIXL agent
    (``engine.settings``); ``compute_quota_s`` see §6.2; ``alpha_tokens`` and ``beta_tokens`` see
    Algorithm 1, None as the router derives them; ``vllm_args`` go to the router's front end and
    every engine, ``router_args`` to ``dualpath router``, verbatim; ``config_file`` holds further
    settings of router and engines, in its sections ``router`` and ``engine``; ``api_keys`` are what
    clients have to show, one of them, none for everybody.
    """

    model: str
    storage: str
    prefill: int = 1
    decode: int = 1
    mode: Mode = Mode.DUALPATH
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "auto"
    max_model_len: int | None = None
    block_tokens: int = 64
    hbm_bytes: int = 512 * MIB
    buffer_bytes: int = 1024 * MIB
    layer_buffers: int = 2
    snic_bytes_per_s: float = 0.0
    nixl_engine_config: dict[str, str] = {}
    compute_quota_s: float = 0.3
    quota_flops_per_s: float = 0.0
    alpha_tokens: int | None = None
    beta_tokens: int | None = None
    served_model_names: tuple[str, ...] = ()
    enforce_eager: bool = True
    trace_dir: str = ""
    log_dir: str = ""
    vllm_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()
    config_file: str = ""
    api_keys: tuple[str, ...] = ()
    start_timeout_s: float = 300.0

    def checked(self) -> "LocalClusterSettings":
        """Return self; raises ``ConfigError`` for what can be refused before anything starts."""
        for name in ("prefill", "decode", "hbm_bytes", "buffer_bytes", "block_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        for name in ("layer_buffers", "snic_bytes_per_s", "compute_quota_s"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"{name} is {value}; it must be at least 0")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be between 0 and 65535")
        if "--api-key" in self.vllm_args:
            raise ConfigError(
                "--api-key is among vllm_args, which reach the engines as well, and those have a "
                "key of their own; give it to `dualpath serve` itself, before --vllm-args"
            )
        check_engine_config(self.nixl_engine_config)
        return self

    @property
    def effective_compute_quota_s(self) -> float:
        """Compute quota of the PEs in this mode, 0 for none."""
        return self.compute_quota_s if self.mode.compute_quota else 0.0

    @property
    def effective_layer_buffers(self) -> int:
        """Layer buffers of the PEs in this mode."""
        return self.layer_buffers if self.mode.layerwise else 0
