"""Settings of an engine's traffic manager; the keys of ``kv_connector_extra_config``.

The annotated types are declarations that are also used by settings of a cluster on one machine.
"""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from dualpath.core.addresses import checked_http_url, checked_tcp_address
from dualpath.core.blocks import BlockGeometry, Protection
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import DEFAULT_MODE, Mode
from dualpath.core.names import name_problem
from dualpath.core.settings import Setting, Settings, declared, nearest, refuse_empty_secret
from dualpath.node.home import with_home
from dualpath.storage.compression import CodecName
from dualpath.storage.quotas import StorageLimits
from dualpath.storage.sealed_blocks import STORAGE_KEY_VARIABLE
from dualpath.transport.ucx_config import check_engine_config

# -------------------------------------------------------------------------------- storage settings
# Settings of the limits of a storage, used by engines and by a stand-alone janitor.

StorageQuota = Annotated[
    int,
    Setting(
        "maximum size of the storage, all namespaces together, such as 2TiB; 0 for no limit",
        ge=0,
    ),
]
NamespaceQuota = Annotated[
    int, Setting("maximum size of one namespace (a model at one setting); 0 for no limit", ge=0)
]
TenantQuota = Annotated[
    int,
    Setting(
        "maximum size of one tenant, that is of requests with one cache_salt, or with none; 0 for "
        "no limit",
        ge=0,
    ),
]
StorageTtl = Annotated[
    float, Setting("remove a prefix that was not used for this time; 0 for no limit", ge=0)
]


class StorageLimitSettings(Settings, frozen=True, kw_only=True):
    """Limits of the size of a storage, and of the eviction of its blocks."""

    storage_quota: StorageQuota = 0
    storage_namespace_quota: NamespaceQuota = 0
    storage_tenant_quota: TenantQuota = 0
    storage_ttl: StorageTtl = 0.0
    storage_high: Annotated[
        float, Setting("share of a quota above which blocks are evicted", gt=0, le=1)
    ] = 0.95
    storage_low: Annotated[
        float, Setting("share of a quota down to which blocks are evicted", gt=0, le=1)
    ] = 0.85
    storage_protect_s: Annotated[
        float,
        Setting(
            "never evict blocks used within this time; engines rely on a block that they have "
            "seen for up to 120 s",
            ge=0,
        ),
    ] = 150.0

    def check(self) -> None:
        """Raise ``ConfigError`` if the low watermark is above the high one."""
        super().check()
        if self.storage_low > self.storage_high:
            raise ConfigError(
                f"{{storage_low}} is {self.storage_low:g}, above {{storage_high}} of "
                f"{self.storage_high:g}; set it below"
            )

    @property
    def limits(self) -> StorageLimits:
        """The limits in the form of the janitor."""
        return StorageLimits(
            quota_bytes=self.storage_quota,
            namespace_quota_bytes=self.storage_namespace_quota,
            tenant_quota_bytes=self.storage_tenant_quota,
            ttl_s=self.storage_ttl,
            high=self.storage_high,
            low=self.storage_low,
            protect_s=self.storage_protect_s,
        )


#: Measured with ``dualpath lab bench data-plane``: 4 reads do not saturate the device.
DEFAULT_PARALLEL_READS = 16
DEFAULT_PARALLEL_WRITES = 4

#: Values of ``profile`` that are not files.
PROFILE_AUTO, PROFILE_OFF = "auto", "off"

Storage = Annotated[
    str,
    Setting(
        "external KV storage: a path, file://PATH, s3://BUCKET/PREFIX or nixl+gds://PATH",
        metavar="PATH",
    ),
]
SecretFile = Annotated[
    str,
    Setting(
        "file with the secret of router and engines; empty: DUALPATH_CLUSTER_SECRET of the "
        "environment; without a secret router and engines must be on one machine",
        metavar="FILE",
    ),
]
StorageKeyFile = Annotated[
    str,
    Setting(
        "file with the storage keys, one per line, newest first: the first one seals written "
        "blocks, all of them open read blocks; empty: DUALPATH_STORAGE_KEY of the environment",
        metavar="FILE",
    ),
]
StorageProtection = Annotated[
    Literal["auto", "none", "authenticated", "encrypted"],
    Setting(
        "protection of stored blocks against forgery (authenticated), and also against reading "
        "(encrypted); both need a storage key; auto: encrypted with a storage key, else none"
    ),
]
StorageCodecSetting = Annotated[
    CodecName,
    Setting(
        "lossless compression of the blocks that are written to storage; zstd: on, needs the "
        "package backports.zstd; auto: on where a probe at start finds that reads become faster "
        "and writes no slower; compressed blocks are read with any value"
    ),
]
EngineMode = Annotated[Mode, Setting("how KV is loaded; must equal the router's")]
Rollouts = Annotated[
    bool,
    Setting(
        "let a trainer pause engines, put them to sleep and change their weights through vLLM's "
        "development routes, which this opens"
    ),
]
BufferBytes = Annotated[int, Setting("PE or DE buffer of an engine (80 GB per node in §A.4)", ge=1)]
ReceiveHbmShare = Annotated[
    float,
    Setting(
        "share of a vLLM decode engine's KV memory in which it receives prompts with handover hbm "
        "or auto; must hold a prompt of max_model_len, decoding has the rest; 0: none",
        ge=0,
        le=0.9,
    ),
]
DramBytes = Annotated[
    int,
    Setting(
        "extra DRAM for cached blocks of earlier requests, added to the buffer, or shared through "
        "dram_dir",
        ge=0,
    ),
]
DramDir = Annotated[
    str,
    Setting(
        "directory in memory, such as /dev/shm/kv, in which the engines of a machine share one "
        "cache of dram_bytes; empty: each engine adds dram_bytes to its own buffer",
        metavar="DIR",
    ),
]
LayerBuffers = Annotated[
    int, Setting("layers of KV in a PE's HBM, 0 for all; must be 0 in mode basic", ge=0)
]
ComputeQuota = Annotated[
    float, Setting("limit of a forward batch's predicted attention time (§6.2), 0 for none", ge=0)
]
QuotaFlops = Annotated[
    float,
    Setting("attention throughput for the prediction, 0: as profiled, otherwise assumed", ge=0),
]
Profile = Annotated[
    str,
    Setting(
        "source of a PE's speed, from which alpha, beta and the compute quota are derived: auto "
        "measures storage and some forward passes at start and caches the result for the passes, "
        "off uses assumptions, FILE is a file of `dualpath profile`",
        metavar="auto|off|FILE",
    ),
]
SnicRate = Annotated[
    float,
    Setting("limit of an engine's storage reads, which emulates its NIC; 0 for none", ge=0),
]
EngineTransport = Annotated[
    Literal["auto", "nixl", "memory"],
    Setting(
        "transport of KV between engines; auto: shared memory between engines of one machine and "
        "NIXL between machines; nixl: NIXL only; memory: shared memory only, for engines of one "
        "machine without GPUs and without NIXL"
    ),
]
NixlConfig = Annotated[
    dict[str, str],
    Setting(
        "UCX settings of NIXL without UCX_, such as IB_SL=2, IB_TRAFFIC_CLASS=106 or "
        "TCP_PORT_RANGE=20480-24575; a UCX_ variable in the environment overrides them",
        metavar="KEY=VALUE,…",
    ),
]


#: UCX's setting of the network devices that it may use.
NET_DEVICES = "NET_DEVICES"


class EngineSettings(StorageLimitSettings, frozen=True, kw_only=True):
    """Settings of one engine; ``nixl_engine_config`` carries the traffic class of KV (§A.1)."""

    role: Annotated[Role, Setting("PE or DE")]
    engine_id: Annotated[
        str,
        Setting(
            "name, unique in the cluster; a new process with the same name replaces the old one"
        ),
    ]
    router: Annotated[
        str, Setting("the router's control address tcp://host:port", metavar="TCP-ADDRESS")
    ]
    api_url: Annotated[
        str,
        Setting("base URL of this engine's HTTP server for the router", metavar="URL"),
    ]
    storage: Storage
    allowed_hosts: Annotated[
        tuple[str, ...],
        Setting(
            "further names by which this engine's HTTP server may be called without an API key; "
            "addresses, names without a dot, this machine's and that of api_url are allowed",
            metavar="NAME,…",
        ),
    ] = ()
    two_leg_scheduler: Annotated[
        str,
        Setting(
            "the scheduler's address for front ends (its front_ends_port): the engine then serves "
            "requests in two legs that another proxy sends to it; empty: requests come through "
            "dualpath's router only",
            metavar="TCP-ADDRESS",
        ),
    ] = ""
    cluster_secret_file: SecretFile = ""
    storage_key_file: StorageKeyFile = ""
    storage_protection: StorageProtection = "auto"
    storage_codec: StorageCodecSetting = "off"
    mode: EngineMode = DEFAULT_MODE
    node: Annotated[
        str, Setting("engines of one node share a storage NIC; empty: a node of its own")
    ] = ""
    group: Annotated[
        str, Setting("scheduling group, one role each; empty: by the scheduler's engine_groups")
    ] = ""
    buffer_bytes: BufferBytes = 1 << 30
    dram_bytes: DramBytes = 0
    dram_dir: DramDir = ""
    staging_blocks: Annotated[
        int, Setting("DRAM slots for generated blocks that are being written to storage", ge=1)
    ] = 32
    layer_buffers: LayerBuffers = 2
    compute_quota_s: ComputeQuota = 0.3
    quota_flops_per_s: QuotaFlops = 0.0
    profile: Profile = PROFILE_AUTO
    snic_bytes_per_s: SnicRate = 0.0
    parallel_reads: Annotated[int, Setting("blocks read from storage at a time", ge=1)] = (
        DEFAULT_PARALLEL_READS
    )
    parallel_writes: Annotated[
        int, Setting("requests that are written to storage at a time", ge=1)
    ] = DEFAULT_PARALLEL_WRITES
    storage_write_share: Annotated[
        float,
        Setting(
            "maximum share of writes in the bytes to and from storage while requests wait for "
            "reads of this engine; 1: no limit",
            gt=0,
            le=1,
        ),
    ] = 1.0
    storage_write_bytes_per_s: Annotated[
        float,
        Setting("limit of this engine's writes to storage, to save an SSD; 0: none", ge=0),
    ] = 0.0
    storage_write_twice: Annotated[
        bool, Setting("write a block only when it is computed a second time")
    ] = False
    transfer_deadline_s: Annotated[
        float,
        Setting(
            "how long a forward pass waits for transfers with an engine that make no progress; "
            "must be below the router's limits",
            gt=0,
        ),
    ] = 30.0
    device_copies: Annotated[
        Literal["auto", "nixl", "cuda"],
        Setting(
            "library for copies between DRAM and HBM of one GPU engine (§5.2); auto: CUDA without "
            "an active RDMA NIC"
        ),
    ] = "auto"
    transport: EngineTransport = "auto"
    receive_hbm_share: ReceiveHbmShare = 0.0
    share_loads: Annotated[
        bool,
        Setting(
            "ranks of a prefill engine that replicate KV, as with latent attention, load one part "
            "each and gather the others on their GPUs"
        ),
    ] = False
    ucx_tls: Annotated[
        str,
        Setting(
            "UCX transports, such as tcp; UCX_TLS of the environment overrides it; empty: UCX "
            "chooses"
        ),
    ] = ""
    progress_delay_us: Annotated[
        int,
        Setting("pause of UCX's progress thread; 0 spins a core, use it only with RDMA", ge=0),
    ] = 1000
    touch_memory: Annotated[
        bool,
        Setting(
            "touch all of the engine's DRAM at start, so that no transfer waits until the kernel "
            "has cleared a page; with RDMA NICs the registration of memory does so anyway"
        ),
    ] = False
    nixl_engine_config: NixlConfig = msgspec.field(default_factory=dict)
    net_devices: Annotated[
        tuple[str, ...],
        Setting(
            "UCX's network device of each rank, such as mlx5_0:1,mlx5_1:1, of data-parallel ranks "
            "of one server one after another; empty: the RDMA port nearest to the GPU of each",
            metavar="DEVICE,…",
        ),
    ] = ()
    drain_timeout_s: Annotated[
        float,
        Setting("time limit for requests under way after SIGTERM; 0: they end at once", ge=0),
    ] = 600.0
    lora_modules: Annotated[
        dict[str, str],
        Setting(
            "LoRA adapters of this engine; set from its --lora-modules",
            metavar="NAME=PATH,…",
        ),
    ] = msgspec.field(default_factory=dict)
    rollouts: Rollouts = False
    keep_buffer: Annotated[
        bool,
        Setting(
            "keep the memory of the buffer while a trainer has this engine, unless another process "
            "may still write to it; else it is returned to the machine"
        ),
    ] = False
    trace_out: Annotated[
        str, Setting("file for a Chrome trace, written at the end; empty: none", metavar="FILE")
    ] = ""

    def check(self) -> None:
        """Raise ``ConfigError`` for values no engine can run with."""
        super().check()
        if self.router:
            checked_tcp_address(self.router, "router")
        if self.two_leg_scheduler:
            checked_tcp_address(self.two_leg_scheduler, "two_leg_scheduler")
        if self.api_url:
            checked_http_url(self.api_url, "api_url")
        for key in ("engine_id", "node", "group"):
            if (wrong := name_problem(getattr(self, key))) is not None:
                raise ConfigError(f"{{{key}}}: {wrong}")
        if self.dram_dir and not self.dram_bytes:
            raise ConfigError(
                f"{{dram_dir}} is {self.dram_dir!r} and {{dram_bytes}} is 0; set how much DRAM the "
                "engines share there"
            )
        if self.storage_codec == "zstd" and (why := self.codec_refusal) is not None:
            raise ConfigError(f"{{storage_codec}} is zstd, and {why}; set it to off")
        check_engine_config(self.nixl_engine_config)

    def of_rank(self, rank: int, nearest: str) -> "EngineSettings":
        """Return the settings of one rank, with its own network device.

        ``nearest`` is the device to use if none is set, empty to let UCX choose.  Raises
        ``ConfigError`` if devices are set for other ranks only.
        """
        if self.net_devices and rank >= len(self.net_devices):
            raise ConfigError(
                f"{{net_devices}} has {len(self.net_devices)} devices, none for rank {rank}; give "
                "one for each rank"
            )
        device = self.net_devices[rank] if self.net_devices else nearest
        if not device:
            return self
        config = {NET_DEVICES: device, **self.nixl_engine_config}
        return msgspec.structs.replace(self, nixl_engine_config=config)

    @property
    def limits_storage(self) -> bool:
        """Whether settings of this engine limit the storage or its writes."""
        limited = self.limits.any or self.storage_write_twice or self.storage_write_bytes_per_s > 0
        return limited and self.mode.moves_bytes

    @property
    def codec_refusal(self) -> str | None:
        """Why blocks of this engine cannot be compressed, None if they can be."""
        if not self.mode.moves_bytes:
            return f"mode {self.mode.value} stores no KV"
        if self.storage.startswith("nixl+"):
            return (
                f"{self.storage.partition('://')[0]}:// is for storage that is faster than "
                "compression, and has not been run with compressed blocks"
            )
        return None

    def buffer_slots(self, geometry: BlockGeometry) -> int:
        """Number of slots of the buffer."""
        own_bytes = 0 if self.dram_dir else self.dram_bytes
        return (self.buffer_bytes + own_bytes) // geometry.full_block_bytes

    def check_buffer(self, full_block_bytes: int) -> None:
        """Raise ``ConfigError`` if the buffer has no slot for a Full Block of this size."""
        own_bytes = self.buffer_bytes + (0 if self.dram_dir else self.dram_bytes)
        if own_bytes < full_block_bytes:
            raise ConfigError(
                f"{{buffer_bytes}} is {self.buffer_bytes}, below the {full_block_bytes} bytes of "
                "one Full Block of this model; give room for whole prompts"
            )

    @property
    def protection(self) -> Protection | msgspec.UnsetType:
        """The protection of blocks in the engine's namespace; unset for plain blocks."""
        named = self.storage_protection
        if named == "auto":
            # A storage key alone must suffice to have no plain blocks.
            # With an empty variable the loading of keys raises an error.
            given = self.storage_key_file or STORAGE_KEY_VARIABLE in os.environ
            named = "encrypted" if given else "none"
        sealed = named != "none" and self.mode.moves_bytes
        return Protection(named) if sealed else msgspec.UNSET

    @property
    def seals_blocks(self) -> bool:
        """Whether storage keys are needed."""
        return self.protection is not msgspec.UNSET

    @property
    def node_name(self) -> str:
        """The engine's node; if none is set, a node of its own."""
        return self.node or self.engine_id

    @property
    def group_name(self) -> str:
        """The scheduling group that it was given, else its role's name."""
        return self.group or self.role.value

    def layers_in_hbm(self, layers: int) -> int:
        """Number of layers, of ``layers``, with KV in HBM at a time; all but for layerwise PEs."""
        if self.role is Role.DECODE or not self.mode.layerwise:
            return layers
        return min(self.layer_buffers, layers) or layers


def parse_settings(values: dict[str, Any]) -> EngineSettings:
    """Build settings from a plain dictionary.

    Raises ``ConfigError`` that names the key, the value and the limit.
    """
    for name, value in values.items():
        refuse_empty_secret(name, value)
    try:
        return msgspec.convert(values, EngineSettings, strict=False)
    except msgspec.ValidationError as error:
        known = [field.name for field in declared(EngineSettings)]
        hints = [f"{name}: {nearest(name, known)}" for name in values if name not in known]
        hint = "; ".join(hints) or f"known keys are {', '.join(known)}"
        raise ConfigError(f"kv_connector_extra_config: {error}; {hint}") from error


def read_settings_file(path: str) -> dict[str, Any]:
    """Return the sections of a TOML file; raises ``ConfigError`` if it cannot be read."""
    try:
        return tomllib.loads(Path(with_home(path)).read_bytes().decode())
    except OSError as error:
        raise ConfigError(
            f"settings file {path!r} cannot be read ({error.strerror}); check --config"
        ) from error
    except (ValueError, RecursionError) as error:
        # ValueError: not UTF-8, not TOML or an invalid date; RecursionError: nested too deep.
        raise ConfigError(f"settings file {path!r} cannot be read: {error}; correct it") from error
