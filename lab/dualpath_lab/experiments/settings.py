"""Settings of the experiments with agents; this module imports no heavy dependencies."""

import enum
import json
from pathlib import Path
from typing import Annotated

import msgspec

from dualpath.core.blocks import BlockGeometry, slices_of
from dualpath.core.cluster import NodesSettings, parse_nodes
from dualpath.core.errors import ConfigError
from dualpath.core.modes import DEFAULT_MODE, Mode
from dualpath.core.settings import Setting, Settings
from dualpath.engine.settings import (
    DEFAULT_PARALLEL_READS,
    BufferBytes,
    ComputeQuota,
    DramBytes,
    LayerBuffers,
    StorageProtection,
)
from dualpath.launch.settings import HbmBytes
from dualpath.policy.rebalance import RebalanceSettings
from dualpath.router.settings import DramTier, EngineGroups
from dualpath.vllm.front_end_settings import BlockTokens, Dtype, MaxModelLen
from dualpath.workload.formats import SkipBroken
from dualpath.workload.replay.client import SentHintsSetting, ToolDelaysSetting
from dualpath.workload.replay.result import SentHints, ToolDelays
from dualpath_lab.emulated.settings import (
    BatchCap,
    Layers,
    Speedup,
    Verify,
    VerifyChoice,
    block_geometry,
)
from dualpath_lab.experiments.machine_load import BUSY_LIMIT
from dualpath_lab.nodes.settings import LabSettings
from dualpath_sim.catalog.load import CostsName, GpuName

#: The ablation of §7.5 in its order, with split reads and the upper bound.
ALL_MODES = (
    Mode.BASIC,
    Mode.LAYERWISE,
    Mode.ROUND_ROBIN,
    Mode.DUALPATH,
    Mode.SPLIT,
    Mode.ORACLE,
)

#: Links that two cores can saturate at 1P2D, in the paper's proportion of SNIC to CNIC.
BENCH_LAB = LabSettings(
    name="bench", snic_bytes_per_s=25e6, cnic_bytes_per_s=200e6, image_bytes=4 << 30
)

_BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}

Modes = Annotated[tuple[Mode, ...], Setting("modes, in this order")]
Repeat = Annotated[int, Setting("number of repetitions, interleaved", ge=1, le=100)]
Seed = Annotated[int, Setting("random seed of lengths, tokens and arrivals", ge=0, lt=2**63)]


class History(enum.StrEnum):
    """Where the KV of agents' earlier turns is when a run begins."""

    STORED = "stored"
    """Only in storage."""
    DRAM = "dram"
    """In storage, and the most recently requested histories in DRAM as far as they fit."""
    NONE = "none"
    """There are none: agents begin with the first turns of their trajectories."""

    @property
    def description(self) -> str:
        """Description for reports."""
        return {
            History.STORED: "KV of earlier turns is stored",
            History.DRAM: "KV of earlier turns is stored, and was requested once before the run, "
            "so that DRAM caches as much of it as fits",
            History.NONE: "windows are the first turns, no KV is stored before",
        }[self]


class WindowSettings(Settings, frozen=True, kw_only=True):
    """``agents`` windows of ``turns`` turns of long trajectories, or ``whole`` trajectories.

    ``even`` generates lengths without spread, so that all agents end at about the same time.
    ``longest_pause_s`` limits recorded tool times, of which a few would dominate a run; replays
    wait for them only with the option for it.
    """

    trace: Annotated[
        str,
        Setting(
            "32K, 48K or 64K (generated after Table 2), or a trace that `dualpath replay` reads",
            metavar="NAME",
        ),
    ] = "32K"
    skip_broken: SkipBroken = False
    agents: Annotated[int, Setting("number of windows", ge=1, le=100_000, flag=False)] = 16
    turns: Annotated[
        int, Setting("turns of an agent, its window of a trajectory", ge=1, le=10_000)
    ] = 4
    whole: Annotated[
        bool,
        Setting("replay whole trajectories from their first turn to their last, as in §7.4"),
    ] = False
    scale: Annotated[float, Setting("factor of all token counts", ge=1e-4, le=100)] = 0.125
    scale_append: Annotated[
        float, Setting("factor of the tokens that replayed turns append (Fig. 9)", ge=1e-4, le=100)
    ] = 1.0
    scale_generate: Annotated[
        float,
        Setting("factor of the tokens that replayed turns generate (Fig. 9)", ge=1e-4, le=100),
    ] = 1.0
    even: Annotated[bool, Setting("generate equal trajectories and turns")] = False
    history: Annotated[
        History,
        Setting(
            "KV of earlier turns is in storage, also in DRAM as far as it fits, or there are no "
            "earlier turns (windows begin with trajectories)"
        ),
    ] = History.STORED
    longest_pause_s: Annotated[float, Setting("maximum of recorded tool times", gt=0, le=86400)] = (
        20.0
    )
    seed: Seed = 0


class EmulatedNodes(Settings, frozen=True, kw_only=True):
    """The emulated engines of a lab, all with the same settings; see ``emulated.settings``.

    ``layers`` and ``layer_block_bytes`` (of ``block_tokens`` tokens) replace the model's: the
    default is a few layers with DeepSeek's Layer Block of 42 KiB, so that blocks have their real
    size and prompts are small enough for the links.  Without ``dram_tier`` every hit is read, as in
    the paper.
    """

    model: CostsName = "qwen2.5-32b"
    gpu: GpuName = "hopper"
    layers: Layers = 8
    block_tokens: BlockTokens = 64
    layer_block_bytes: Annotated[int, Setting("bytes of KV of a block in one layer", ge=1)] = (
        42 << 10
    )
    prefill_tp: Annotated[
        int, Setting("ranks of a PE, each with its own CNIC; must equal decode_tp", ge=1, le=8)
    ] = 1
    decode_tp: Annotated[int, Setting("ranks of a DE", ge=1, le=8)] = 1
    kv_heads: Annotated[
        int, Setting("KV heads, divided among ranks; 1: latent KV, replicated", ge=1)
    ] = 1
    dp: Annotated[
        int,
        Setting(
            "engines of a node: a data-parallel group, which shares its links",
            ge=1,
            le=8,
        ),
    ] = 1
    dp_lock_step: Annotated[
        bool, Setting("prefill engines of a group compute their passes in lock step")
    ] = False
    speedup: Speedup = 50.0
    buffer_bytes: BufferBytes = 768 << 20
    dram_bytes: DramBytes = 0
    dram_tier: DramTier = False
    recompute_limit_s: Annotated[
        float, Setting("as the router's, 0 by default: load all hits", ge=0)
    ] = 0.0
    engine_groups: EngineGroups = "role"
    storage_protection: StorageProtection = "none"
    hbm_bytes: HbmBytes = 768 << 20
    layer_buffers: LayerBuffers = 2
    compute_quota_s: ComputeQuota = 0.3
    batch_cap_tokens: BatchCap = 1024
    verify: VerifyChoice = Verify.SAMPLED
    trace_dir: Annotated[
        str, Setting("folder for Chrome traces of the engines in each mode's last run; empty: none")
    ] = ""

    def check(self) -> None:
        """Raise ``ConfigError`` for block sizes that are no multiple of the word size per token.

        Also for different numbers of ranks: CNICs of equal ranks form a network.
        """
        super().check()
        if self.prefill_tp != self.decode_tp:
            raise ConfigError(
                f"{{prefill_tp}} is {self.prefill_tp} and {{decode_tp}} {self.decode_tp}; in a lab "
                "only CNICs of equal ranks are connected, make them equal"
            )
        slices_of(self.prefill_tp, self.kv_heads)
        made = block_geometry(
            self.layers, self.block_tokens, self.kv_bytes_per_token, self.kv_heads
        )
        if made.bytes_of(0) != self.layer_block_bytes:
            raise ConfigError(
                f"{{layer_block_bytes}} is {self.layer_block_bytes}, must be a multiple of "
                f"{made.bytes_of(0) // self.block_tokens * self.block_tokens or 8} for "
                f"{self.block_tokens} tokens; correct it"
            )

    @property
    def seals_blocks(self) -> bool:
        """Whether stored blocks are authenticated or encrypted."""
        return self.storage_protection in ("authenticated", "encrypted")

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV of a token, all layers."""
        return self.layers * self.layer_block_bytes / self.block_tokens


class VllmNodes(Settings, frozen=True, kw_only=True):
    """The vLLM engines of a lab, all with the same settings.

    ``model`` is a folder with weights, e.g. made by `dualpath model wide`.
    """

    model: Annotated[str, Setting("folder with weights")]
    dtype: Dtype = "float32"
    block_tokens: BlockTokens = 64
    max_model_len: MaxModelLen = 8192
    hbm_bytes: HbmBytes = 512 << 20
    buffer_bytes: BufferBytes = 512 << 20
    dram_tier: DramTier = False
    engine_groups: EngineGroups = "role"
    compute_quota_s: ComputeQuota = 4.0

    def check(self) -> None:
        """Raise ``ConfigError`` for a model that is not a folder with a config.json."""
        super().check()
        if not (Path(self.model) / "config.json").is_file():
            raise ConfigError(
                f"model {self.model!r} is not a folder with a config.json; make one with "
                "`dualpath model wide`, which prints its path"
            )

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV of a token, all layers, from the model's config.json (no MLA)."""
        config = json.loads((Path(self.model) / "config.json").read_text(encoding="utf-8"))
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        dimension = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        words = 2 * config["num_hidden_layers"] * heads * dimension
        return float(words * _BYTES_OF.get(self.dtype, 2))


class JctSettings(Settings, frozen=True, kw_only=True):
    """Clusters, modes and agents; every mode runs ``repeat`` times, interleaved with the others.

    ``agents_per_node`` times P + D agents replay ``windows`` (its ``agents`` are replaced) on
    links of ``lab`` (its nodes are replaced).  Engines are vLLM's if ``vllm`` names a model, else
    ``emulated``.
    """

    nodes: Annotated[
        tuple[str, ...],
        Setting("clusters, as numbers of prefill and decode nodes", metavar="xPyD,…"),
    ] = ("1P1D", "2P1D", "1P2D", "2P4D")
    mode: Modes = ALL_MODES
    repeat: Repeat = 3
    agents_per_node: Annotated[int, Setting("agents per node of the cluster", ge=1)] = 8
    seed: Seed = 0
    busy_limit: Annotated[
        float,
        Setting(
            "runs that use links are repeated if the busy share of the machine was above this",
            gt=0,
            le=1,
        ),
    ] = BUSY_LIMIT
    windows: WindowSettings = WindowSettings()
    lab: LabSettings = BENCH_LAB
    emulated: EmulatedNodes = EmulatedNodes()
    vllm: Annotated[
        str,
        Setting(
            "use vLLM engines with this model folder (`dualpath model wide` creates one) instead "
            "of emulated engines",
            metavar="MODEL",
        ),
    ] = ""

    def lab_of(self, nodes: str) -> LabSettings:
        """Return the lab for one cluster, with one CNIC per rank of an emulated engine."""
        cnics = max(self.lab.cnics, 1 if self.vllm else self.emulated.prefill_tp)
        return msgspec.structs.replace(self.lab, nodes=nodes, cnics=cnics)

    def check(self) -> None:
        """Raise ``ConfigError`` for missing clusters or modes, and invalid clusters."""
        super().check()
        if not self.nodes or not self.mode:
            raise ConfigError(
                "no {nodes} or no {mode}; give at least one of each, like 1P2D and basic"
            )
        for nodes in self.nodes:
            parse_nodes(nodes)


# ----------------------------------------------------------------------------- data plane settings
# Settings of the data-plane experiment, and the results of its parts.


class Reader(enum.StrEnum):
    """The compared ways to read stored Full Blocks."""

    FIO = "fio, libaio"
    """Discards the data; verifies nothing."""
    NIXL = "raw NIXL POSIX, libaio"
    """Into registered memory; verifies nothing."""
    READ_QUEUE = "dualpath read queue"
    """Into slots of the registered buffer, each block verified by its checksum."""


class Mover(enum.StrEnum):
    """The compared ways to transfer Layer Blocks."""

    NIXL_AS_IT_COMES = "raw NIXL, as it comes"
    """With UCX's defaults; its progress thread never sleeps."""
    NIXL = "raw NIXL, our UCX settings"
    TRAFFIC_MANAGER = "dualpath traffic manager"
    """Forward passes without computation: plan, pump and counters included."""


class Leg(enum.StrEnum):
    """The direction; the PE starts both."""

    DE_TO_PE = "DE buffer to PE HBM (READ)"
    """Hit blocks that the DE has read."""
    PE_TO_DE = "PE HBM to DE buffer (WRITE)"
    """New blocks."""


class DataPlaneSettings(Settings, frozen=True, kw_only=True):
    """One data-plane experiment.

    Full Blocks of ``layers`` Layer Blocks of ``layer_block_bytes``; 42 KiB are DeepSeek's 64 tokens
    of 672 bytes.  ``storage`` is a directory on the disk to measure:  ``stored_blocks`` are written
    there, read cold, and removed: by the baselines ``read_batch_blocks`` at a time, by dualpath
    ``parallel_reads`` at a time.  ``blocks`` is the prompt, in Full Blocks; their Layer Blocks are
    transferred over ``tls``, for at least ``move_s`` seconds.  ``descriptor_counts`` are the pieces
    of single transfers.  Readers and movers run ``repeat`` times, interleaved; reported are
    medians.

    In a shell on a node of a lab (``dualpath lab run``) the reads are throttled by the lab.
    """

    storage: Annotated[str, Setting("directory on the disk to measure", metavar="DIR")] = "."
    layers: Annotated[int, Setting("Layer Blocks of a Full Block", ge=2, flag=False)] = 61
    layer_block_bytes: Annotated[int, Setting("bytes of a Layer Block", ge=1, flag=False)] = 43008
    stored_blocks: Annotated[
        int, Setting("blocks to write, read cold and remove", ge=1, flag=False)
    ] = 200
    read_batch_blocks: Annotated[
        int, Setting("blocks read at a time by the baselines", ge=1, flag=False)
    ] = 16
    parallel_reads: Annotated[
        int, Setting("blocks read at a time by dualpath", ge=1, flag=False)
    ] = DEFAULT_PARALLEL_READS
    blocks: Annotated[int, Setting("Full Blocks of the transferred prompt", ge=2, flag=False)] = 100
    tls: Annotated[str, Setting("UCX transports", flag=False)] = "tcp"
    move_s: Annotated[float, Setting("minimum duration of transfers", gt=0, flag=False)] = 1.5
    descriptor_counts: Annotated[
        tuple[int, ...], Setting("pieces of single transfers", ge=1, flag=False)
    ] = (
        1,
        10,
        100,
        1000,
        10000,
    )
    repeat: Repeat = 3

    def check(self) -> None:
        """Raise ``ConfigError`` for a missing directory or missing sizes."""
        super().check()
        if not self.storage:
            raise ConfigError("{storage} is missing; give a directory on the disk to measure")
        if not self.descriptor_counts:
            raise ConfigError("{descriptor_counts} is empty; give at least one")

    @property
    def geometry(self) -> BlockGeometry:
        """The geometry of the blocks; their number of tokens is arbitrary."""
        return BlockGeometry.uniform(
            layers=self.layers, block_tokens=64, layer_block_bytes=self.layer_block_bytes
        )


class Rate(msgspec.Struct, frozen=True):
    """The rate of one run, and the CPU time of all its processes."""

    bytes_per_s: float
    cpu_s_per_gb: float


class PostCost(msgspec.Struct, frozen=True):
    """Time of the posting thread for one transfer of ``pieces`` pieces, in seconds.

    The steps of ``Transport.post``: checking both lists of pieces, making NIXL's handle from
    prepared descriptors, posting it.  Over TCP posting includes sending the bytes.
    """

    pieces: int
    check_s: float
    make_s: float
    post_s: float

    @property
    def descriptor_us(self) -> float:
        """Checks and handle, in µs per piece."""
        return (self.check_s + self.make_s) / self.pieces * 1e6


# --------------------------------------------------------------------------------- online settings
# Settings of the online experiment; this module imports no heavy dependencies.


class Ends(enum.StrEnum):
    """When a run with random arrivals ends."""

    DONE = "done"
    """Agents arrive for a fixed time, and the run ends when all are done."""
    STEADY = "steady"
    """The paper's rule (§7.4): in steady state, or above the limit of TTFT."""


class OnlineSettings(Settings, frozen=True, kw_only=True):
    """Agents arrive (Poisson) on one cluster, at rates found by bisection.

    With ``ends`` done they arrive for ``arrive_s``.  With ``ends`` steady they arrive until the
    mean TTFT over the last ``window_s`` exceeds ``ttft_slo_s`` or is within 5 % of what it was
    ``lookback_s`` before, for ``longest_s`` at most; latencies are those of that window.

    A rate meets the SLO if mean TTFT is at most ``ttft_slo_s`` and mean TPOT at most
    ``tpot_slo_s``.  ``agreeing_runs`` and ``most_runs`` apply to each mode's search
    (``model.evaluation.rate_search``).
    """

    jct: JctSettings = JctSettings(nodes=("1P2D",), mode=(Mode.BASIC, Mode.DUALPATH), repeat=1)
    first_agents_per_s: Annotated[
        float, Setting("rate at which the search begins by doubling or halving", gt=0, le=1e6)
    ] = 0.4
    least_agents_per_s: Annotated[float, Setting("lowest rate that is tried", gt=0, le=1e6)] = 0.05
    most_agents_per_s: Annotated[
        float, Setting("highest rate that is tried; KV is stored for its agents", gt=0, le=1e6)
    ] = 1.6
    precision: Annotated[
        float, Setting("relative width of the final bracket of the capacity", gt=0, le=1)
    ] = 0.1
    agreeing_runs: Annotated[
        int, Setting("runs that must agree on each end of the bracket", ge=1, le=9)
    ] = 2
    most_runs: Annotated[int, Setting("maximum of runs per mode", ge=1, le=1000)] = 16
    ends: Annotated[
        Ends,
        Setting(
            "a run ends when all agents that arrive in {arrive_s} are done, or, as in §7.4, when "
            "the mean TTFT is steady or above its limit"
        ),
    ] = Ends.DONE
    arrive_s: Annotated[
        float, Setting("time in which agents arrive if {ends} is done", gt=0, le=86400)
    ] = 60.0
    window_s: Annotated[
        float, Setting("length of the sliding window of the mean TTFT", gt=0, le=86400)
    ] = 150.0
    lookback_s: Annotated[
        float,
        Setting(
            "the mean TTFT is steady if it is within 5 % of what it was so long before (30 minutes "
            "in the paper)",
            ge=1,
            le=86400,
        ),
    ] = 150.0
    longest_s: Annotated[
        float, Setting("maximum duration of a run if {ends} is steady", gt=0, le=86400)
    ] = 900.0
    ttft_slo_s: Annotated[float, Setting("limit of the mean TTFT", gt=0)] = 2.0
    tpot_slo_s: Annotated[float, Setting("limit of the mean TPOT", gt=0)] = 0.05

    def check(self) -> None:
        """Raise ``ConfigError`` for inconsistent rates, and for several clusters."""
        super().check()
        rates = (self.least_agents_per_s, self.first_agents_per_s, self.most_agents_per_s)
        if not rates[0] <= rates[1] <= rates[2]:
            raise ConfigError(
                f"{{first_agents_per_s}} is {rates[1]:g}, must be between {{least_agents_per_s}} "
                f"({rates[0]:g}) and {{most_agents_per_s}} ({rates[2]:g}); correct one of them"
            )
        if len(self.jct.nodes) != 1:
            raise ConfigError(
                f"{{nodes}} is {self.jct.nodes}; give one cluster for an online experiment"
            )
        if self.ends is Ends.STEADY and self.longest_s < self.window_s + self.lookback_s:
            raise ConfigError(
                f"{{longest_s}} is {self.longest_s:g}, but a run can be steady only after "
                f"{{window_s}} + {{lookback_s}} = {self.window_s + self.lookback_s:g} s; raise it"
            )

    @property
    def agents_arrive_s(self) -> float:
        """The time in which agents arrive at most."""
        return self.longest_s if self.ends is Ends.STEADY else self.arrive_s


# ----------------------------------------------------------------------------------- role settings
# Settings of the experiment on roles; this module imports no heavy dependencies.

#: The policy reacts quickly: agents wait for each answer, so that the backlog stays small.
_REBALANCING = RebalanceSettings(interval_s=2.0, horizon_s=10.0, margin=1.0, rest_s=4.0)


class RoleShiftSettings(NodesSettings, frozen=True, kw_only=True):
    """A load that shifts from prompts to answers, on emulated engines of one machine.

    Every agent has ``turns`` turns in each of two phases; pairs are the means of the phases, and
    lengths are log-normal with the deviation ``spread``.  Engines hold ``hbm_tokens`` of KV, which
    limits the requests of a decode node.  There is no other bottleneck: KV is small, storage is not
    throttled.
    """

    nodes: Annotated[str, Setting("cluster at the start", metavar="xPyD")] = "3P1D"
    agents: Annotated[int, Setting("number of concurrent agents", ge=1, le=1000)] = 12
    turns: Annotated[int, Setting("turns of an agent in each phase", ge=1, le=1000)] = 6
    append_tokens: Annotated[
        tuple[float, ...], Setting("mean appended tokens of a turn in the two phases", ge=1)
    ] = (2000.0, 50.0)
    generate_tokens: Annotated[
        tuple[float, ...], Setting("mean generated tokens of a turn in the two phases", ge=1)
    ] = (4.0, 60.0)
    spread: Annotated[
        float, Setting("standard deviation of the logarithm of lengths", ge=0, le=3)
    ] = 0.3
    model: CostsName = "qwen2.5-32b"
    gpu: GpuName = "hopper"
    speedup: Speedup = 0.25
    layers: Layers = 4
    block_tokens: BlockTokens = 64
    kv_bytes_per_token: Annotated[int, Setting("bytes of KV of a token, all layers", ge=32)] = 256
    hbm_tokens: Annotated[int, Setting("tokens of KV of a decode node", ge=1)] = 40_000
    repeat: Repeat = 1
    seed: Seed = 0
    rebalancing: RebalanceSettings = _REBALANCING

    def check(self) -> None:
        """Raise ``ConfigError`` unless there are two phases."""
        super().check()
        for name in ("append_tokens", "generate_tokens"):
            if len(means := getattr(self, name)) != 2:
                raise ConfigError(f"{{{name}}} is {means}; it takes two means, like 2000,50")

    @property
    def hbm_bytes(self) -> int:
        """``hbm_tokens`` in bytes."""
        return self.hbm_tokens * self.kv_bytes_per_token


def with_prefill_rate(settings: RebalanceSettings, tokens_per_s: float) -> RebalanceSettings:
    """Return the policy's settings with this rate, unless they have one."""
    return msgspec.structs.replace(
        settings,
        prefill_node_tokens_per_s=settings.prefill_node_tokens_per_s or tokens_per_s,
    )


# ----------------------------------------------------------------------------------- tier settings
# Settings of the experiment on a DRAM tier.

#: Storage is the bottleneck without a tier, the PE's computation with one; the CNIC has 8 times the
#: SNIC's rate as in the paper, at rates that leave half of two cores idle.
_LAB = msgspec.structs.replace(BENCH_LAB, snic_bytes_per_s=10e6, cnic_bytes_per_s=80e6)
_WINDOWS = WindowSettings(
    even=True, turns=6, scale_append=8.0, scale_generate=0.25, history=History.DRAM
)
#: Small buffers for running requests: cached blocks are in additional DRAM.
_NODES = EmulatedNodes(speedup=0.15, layers=32, layer_block_bytes=10752, buffer_bytes=64 << 20)


class TierSettings(Settings, frozen=True, kw_only=True):
    """The same agents without and with a tier, by share of the working set that fits, and Oracle.

    The working set is the KV of all agents after their last turn.  All decode nodes together have
    this share of it as DRAM in addition to their buffers; each prefill node has as much as a decode
    node.
    """

    shares: Annotated[
        tuple[float, ...],
        Setting("DRAM in addition to the buffers, as shares of the working set", ge=0),
    ] = (1.0, 0.25, 0.0)
    tool_delays: ToolDelaysSetting = ToolDelays.NONE
    session_hints: SentHintsSetting = SentHints.NONE
    jct: JctSettings = JctSettings(
        nodes=("1P2D",),
        mode=(DEFAULT_MODE,),
        agents_per_node=5,
        windows=_WINDOWS,
        lab=_LAB,
        emulated=_NODES,
    )

    def check(self) -> None:
        """Raise ``ConfigError`` for no share, and for several clusters or modes."""
        super().check()
        if not self.shares:
            raise ConfigError("no {shares}; give at least one, like 1")
        if len(self.jct.nodes) != 1:
            raise ConfigError(
                f"{{nodes}} is {self.jct.nodes}; give one cluster for this experiment"
            )
        if len(self.jct.mode) != 1:
            raise ConfigError(
                f"{{mode}} is {','.join(self.jct.mode)}; give one mode for this experiment"
            )
