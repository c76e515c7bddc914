"""Settings of a cluster that `dualpath serve` starts."""

from typing import Annotated, Literal

import msgspec

from dualpath.core.cluster import NodesSettings, Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import DEFAULT_MODE, Handover
from dualpath.core.settings import Setting
from dualpath.engine.settings import (
    PROFILE_AUTO,
    BufferBytes,
    ComputeQuota,
    DramBytes,
    DramDir,
    EngineMode,
    EngineTransport,
    LayerBuffers,
    NamespaceQuota,
    NixlConfig,
    Profile,
    QuotaFlops,
    ReceiveHbmShare,
    Rollouts,
    SnicRate,
    Storage,
    StorageCodecSetting,
    StorageKeyFile,
    StorageProtection,
    StorageQuota,
    StorageTtl,
    TenantQuota,
)
from dualpath.router.settings import (
    AllowedHosts,
    AlphaTokens,
    ApiKeys,
    AppendAtDecode,
    BetaTokens,
    DramTier,
    EngineGroups,
    EventLog,
    FrontEnds,
    HandoverSetting,
    OpenMetrics,
    RecomputeLimit,
    ThirdEngineReads,
    UnitCount,
    check_units,
)
from dualpath.transport.ucx_config import check_engine_config
from dualpath.vllm.front_end_settings import (
    BlockTokens,
    Dtype,
    Host,
    LoraModules,
    MaxModelLen,
    Model,
    Port,
    ServedNames,
    VllmArgs,
)

HbmBytes = Annotated[int, Setting("KV memory of each device of an engine", ge=1)]
#: Default KV memory of an engine on a CPU.
CPU_HBM_BYTES = 512 << 20


class LocalClusterSettings(NodesSettings, frozen=True, kw_only=True):
    """Settings of ``LocalCluster``; sizes are per engine.

    A node has one engine, or with ``prefill_dp`` or ``decode_dp`` above 1 a data-parallel group.

    ``vllm_args`` are passed to the router's front end and, without the options of HTTPS, to every
    engine.  ``config_file`` has further settings of router and engines, in its sections ``router``
    and ``engine``.
    """

    model: Model
    storage: Storage
    storage_key_file: StorageKeyFile = ""
    storage_protection: StorageProtection = "auto"
    storage_codec: StorageCodecSetting = "off"
    mode: EngineMode = DEFAULT_MODE
    host: Host = "127.0.0.1"
    port: Port = 8000
    control_host: Annotated[
        str, Setting("address of this machine where engines register", flag=False, host=True)
    ] = "127.0.0.1"
    dtype: Dtype = "auto"
    max_model_len: MaxModelLen = None
    block_tokens: BlockTokens = 64
    lora_modules: LoraModules = msgspec.field(default_factory=dict)
    hbm_bytes: Annotated[
        int | None,
        Setting(
            "KV memory of each device of an engine; none: 512 MiB on CPUs, on GPUs by vLLM's "
            "--gpu-memory-utilization",
            ge=1,
        ),
    ] = None
    devices: Annotated[
        tuple[str, ...],
        Setting(
            "GPUs of the engines, prefill first; empty: those of CUDA_VISIBLE_DEVICES, else all "
            "of this machine, or CPUs without GPUs or with vLLM's CPU build",
            metavar="GPU,…",
        ),
    ] = ()
    buffer_bytes: BufferBytes = 1 << 30
    dram_bytes: DramBytes = 0
    dram_dir: DramDir = ""
    dram_tier: DramTier = True
    rollouts: Rollouts = False
    prefill_dp: Annotated[
        int, Setting("PEs per data-parallel group (they share experts); 1: no groups", ge=1)
    ] = 1
    decode_dp: Annotated[int, Setting("DEs per data-parallel group, as prefill_dp", ge=1)] = 1
    prefill_tp: Annotated[int, Setting("devices of a PE: its tensor parallel size", ge=1)] = 1
    decode_tp: Annotated[int, Setting("devices of a DE: its tensor parallel size", ge=1)] = 1
    layer_buffers: LayerBuffers = 2
    decode_prefix_caching: Annotated[
        bool,
        Setting(
            "vLLM's --enable-prefix-caching at DEs: blocks of a prompt that are in their HBM are "
            "not copied again"
        ),
    ] = False
    snic_bytes_per_s: SnicRate = 0.0
    storage_quota: StorageQuota = 0
    storage_namespace_quota: NamespaceQuota = 0
    storage_tenant_quota: TenantQuota = 0
    storage_ttl: StorageTtl = 0.0
    transport: EngineTransport = "auto"
    nixl_engine_config: NixlConfig = msgspec.field(default_factory=dict)
    compute_quota_s: ComputeQuota = 0.3
    quota_flops_per_s: QuotaFlops = 0.0
    profile: Profile = PROFILE_AUTO
    alpha_tokens: AlphaTokens = None
    beta_tokens: BetaTokens = None
    recompute_limit_s: RecomputeLimit = None
    append_at_decode_tokens: AppendAtDecode = 0
    engine_groups: EngineGroups = "role"
    handover: HandoverSetting = Handover.BUFFER
    receive_hbm_share: ReceiveHbmShare = 0.25
    third_engine_reads: ThirdEngineReads = 0
    served_model_names: ServedNames = ()
    enforce_eager: Annotated[
        bool | None,
        Setting(
            "vLLM's --enforce-eager for every engine, without CUDA graphs; none: on CPUs it is on, "
            "on GPUs off"
        ),
    ] = None
    event_log: EventLog = ""
    trace_dir: Annotated[
        str, Setting("folder of Chrome traces of the engines; empty: none", metavar="DIR")
    ] = ""
    log_dir: Annotated[str, Setting("folder of logs; empty: a temporary one", metavar="DIR")] = ""
    vllm_args: VllmArgs = ()
    config_file: Annotated[str, Setting("file with the sections router and engine", flag=False)] = (
        ""
    )
    api_keys: ApiKeys = ()
    allowed_hosts: AllowedHosts = ()
    open_metrics: OpenMetrics = False
    front_ends: FrontEnds = 0
    units: UnitCount = 1
    standby: Annotated[
        bool,
        Setting("run a standby router, ready to become leader when the first one exits"),
    ] = False
    start_timeout_s: Annotated[float, Setting("timeout for all engines to register", gt=0)] = 300.0
    executor: Annotated[
        Literal["local", "ray"], Setting("run processes on this machine or on a Ray cluster")
    ] = "local"
    ray_address: Annotated[
        str,
        Setting(
            "Ray cluster, of which this machine is a node; empty: RAY_ADDRESS, else the local one",
            metavar="HOST:PORT",
        ),
    ] = ""
    ray_strategy: Annotated[
        Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"],
        Setting("how Ray places the engines' bundles over its nodes"),
    ] = "SPREAD"
    ray_cpus: Annotated[
        int, Setting("CPUs that Ray reserves for the router and for each engine process", ge=1)
    ] = 1

    def check(self) -> None:
        """Raise ``ConfigError`` for invalid settings before anything starts."""
        super().check()
        if any(word.partition("=")[0] == "--api-key" for word in self.vllm_args):
            raise ConfigError(
                "--api-key is among {vllm_args}, which are also passed to engines, and engines "
                "have their own key; give it to `dualpath serve` itself as {api_keys}, before "
                "--vllm-args"
            )
        if self.front_ends and self.standby:
            raise ConfigError(
                f"{{front_ends}} is {self.front_ends} and {{standby}} is on; omit {{standby}}: "
                "with front ends the scheduler is restarted automatically"
            )
        check_units(self.units, self.front_ends)
        if self.units > min(self.prefill, self.decode):
            raise ConfigError(
                f"{{units}} is {self.units} and {{nodes}} is {self.nodes!r}; each unit needs a "
                "prefill and a decode node of its own: add nodes, or start fewer units"
            )
        if self.executor == "ray" and self.devices:
            raise ConfigError(
                f"{{devices}} is {','.join(self.devices)} and {{executor}} is ray, which assigns "
                "devices itself; omit {devices}"
            )
        if self.handover is not Handover.BUFFER and not self.receive_hbm_share:
            raise ConfigError(
                f"{{handover}} is {self.handover} and {{receive_hbm_share}} is 0; decode engines "
                "need a share of their KV memory for it, or leave {handover} out"
            )
        check_engine_config(self.nixl_engine_config)

    def unit(self, index: int) -> int:
        """Return the unit of a node of engines, by its number among those of its role."""
        return index % self.units

    def ranks(self, role: Role) -> int:
        """Return the engines per node of this role: the ranks of its data-parallel group."""
        return self.prefill_dp if role is Role.PREFILL else self.decode_dp

    def devices_per_rank(self, role: Role) -> int:
        """Return the devices of each rank of this role: its tensor parallel size."""
        return self.prefill_tp if role is Role.PREFILL else self.decode_tp

    @property
    def effective_compute_quota_s(self) -> float:
        """Compute quota of the PEs in this mode, 0 for none."""
        return self.compute_quota_s if self.mode.compute_quota else 0.0

    @property
    def effective_layer_buffers(self) -> int:
        """Layer buffers of the PEs in this mode."""
        return self.layer_buffers if self.mode.layerwise else 0
