"""Settings of the experiments with agents; this module imports no heavy dependencies."""

import enum
import json
from pathlib import Path
from typing import Annotated

import msgspec

from dualpath.core.cluster import parse_nodes
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.core.parts import slices_of
from dualpath.core.settings import Setting, Settings
from dualpath.engine.settings import (
    BufferBytes,
    ComputeQuota,
    DramBytes,
    LayerBuffers,
    StorageProtection,
)
from dualpath.laboratory.emulated.settings import (
    BatchCap,
    CostsName,
    GpuName,
    Layers,
    Speedup,
    Verify,
    VerifyChoice,
    block_geometry,
)
from dualpath.laboratory.experiments.machine_load import BUSY_LIMIT
from dualpath.laboratory.lab.settings import LabSettings
from dualpath.ops.launch.settings import HbmBytes
from dualpath.router.settings import DramTier, RecomputeLimit
from dualpath.vllm.front_end_settings import BlockTokens, Dtype, MaxModelLen

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
    """``agents`` windows of ``turns`` turns of long trajectories.

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
    agents: Annotated[int, Setting("number of windows", ge=1, le=100_000, flag=False)] = 16
    turns: Annotated[
        int, Setting("turns of an agent, its window of a trajectory", ge=1, le=10_000)
    ] = 4
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
    speedup: Speedup = 50.0
    buffer_bytes: BufferBytes = 768 << 20
    dram_bytes: DramBytes = 0
    dram_tier: DramTier = False
    recompute_limit_s: RecomputeLimit = 0.0
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

    ``agents_per_node`` times P + D agents replay ``windows`` (whose ``agents`` is replaced) on
    links of ``lab`` (whose nodes are replaced).  Engines are vLLM's if ``vllm`` is given, else
    ``emulated``.
    """

    name: Annotated[str, Setting("name of the report and its files")] = "jct"
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
    vllm: VllmNodes | None = None

    def lab_of(self, nodes: str) -> LabSettings:
        """Return the lab for one cluster, with one CNIC per rank of an emulated engine."""
        cnics = max(self.lab.cnics, 1 if self.vllm is not None else self.emulated.prefill_tp)
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
