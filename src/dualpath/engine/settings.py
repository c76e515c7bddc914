"""Settings of an engine's traffic manager; the keys of ``kv_connector_extra_config``."""

from typing import Any, Literal

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.transport.ucx_config import check_engine_config

#: Measured with ``dualpath lab bench data-plane``: 4 do not keep the device busy.
DEFAULT_PARALLEL_READS = 16


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one engine is told at start; unknown keys are refused.

    ``role`` prefill or decode; ``engine_id`` unique in the cluster; ``router`` control address
    ``tcp://host:port``; ``api_url`` base URL of this engine's own HTTP server as the router
    reaches it; ``storage`` a path or URL.  ``cluster_secret_file`` holds the secret that the router
    asks for; empty: the environment's ``DUALPATH_CLUSTER_SECRET``; without either the router must
    be on this machine.

    ``buffer_bytes`` size of the PE or DE buffer (80 GB per node in §A.4); ``staging_blocks``
    slots that generated blocks pass through; ``layer_buffers`` layers of KV in the PE's HBM, 0
    for all; ``compute_quota_s`` bound on a forward batch's attention time (§6.2), 0 for none;
    ``snic_bytes_per_s`` throttles storage reads to emulate a storage NIC, 0 for none;
    ``device_copies`` says who copies between an engine's own DRAM and HBM: NIXL (§5.2), CUDA, or
    CUDA only where no RDMA NIC is up; without a GPU it is always NIXL.
    ``ucx_tls`` and ``progress_delay_us`` tune NIXL (``transport.nixl``); ``nixl_engine_config``
    are UCX settings of this engine's NIXL agent without the ``UCX_`` prefix, which carry the
    traffic class of KV (§A.1): ``IB_SL``, ``IB_TRAFFIC_CLASS``, ``TCP_PORT_RANGE``.  A ``UCX_…``
    environment variable wins over them.  ``trace_out`` is the path of a Chrome trace.
    """

    role: Role
    engine_id: str
    router: str
    api_url: str
    storage: str
    cluster_secret_file: str = ""
    mode: Mode = Mode.DUALPATH
    node: str = ""
    group: str = ""
    buffer_bytes: int = 1 << 30
    staging_blocks: int = 32
    layer_buffers: int = 2
    compute_quota_s: float = 0.3
    quota_flops_per_s: float = 0.0
    snic_bytes_per_s: float = 0.0
    parallel_reads: int = DEFAULT_PARALLEL_READS
    device_copies: Literal["auto", "nixl", "cuda"] = "auto"
    ucx_tls: str = ""
    progress_delay_us: int = 1000
    nixl_engine_config: dict[str, str] = {}
    trace_out: str = ""

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for values no engine can run with."""
        checks = (
            ("buffer_bytes", self.buffer_bytes, 1),
            ("staging_blocks", self.staging_blocks, 1),
            ("layer_buffers", self.layer_buffers, 0),
            ("compute_quota_s", self.compute_quota_s, 0),
            ("snic_bytes_per_s", self.snic_bytes_per_s, 0),
            ("parallel_reads", self.parallel_reads, 1),
            ("progress_delay_us", self.progress_delay_us, 0),
        )
        for name, value, least in checks:
            if value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")
        check_engine_config(self.nixl_engine_config)

    @property
    def node_name(self) -> str:
        """The node this engine is on; without one, a node of its own."""
        return self.node or self.engine_id

    @property
    def group_name(self) -> str:
        """The scheduling group; by default one per role."""
        return self.group or self.role.value


def parse_settings(values: dict[str, Any]) -> EngineSettings:
    """Build settings from a plain dictionary.

    Raises ``ConfigError`` that names the key, the value and what is allowed.
    """
    try:
        return msgspec.convert(values, EngineSettings, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(EngineSettings))
        raise ConfigError(f"kv_connector_extra_config: {error}; known keys are {known}") from error
