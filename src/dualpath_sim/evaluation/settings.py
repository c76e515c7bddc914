"""What is run: the paper's systems (§7.2), one run as a value, and the grids of the figures."""

from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from dualpath.core.cluster import MAX_NODES
from dualpath.core.modes import Mode
from dualpath.core.settings import Setting, Settings
from dualpath.workload.columns.generator import Tail

Objective = Literal["jct", "capacity"]


class System(NamedTuple):
    """A model on the cluster that §7.2 gives it; both are names in the catalog."""

    title: str
    cluster: str
    model: str


DS_660B = System("DS 660B", "paper-660b", "ds-v3.2")
DS_27B = System("DS 27B", "paper-27b", "ds-27b")
QWEN_32B = System("Qwen 32B", "paper-qwen", "qwen2.5-32b")
SYSTEMS = (DS_27B, DS_660B, QWEN_32B)

#: The systems of Fig. 7 to 11; SGL(MC) is another program and is not modelled.
MAIN_MODES = (Mode.BASIC, Mode.DUALPATH, Mode.ORACLE)


Curves = Literal["none", "balance", "timeline"]


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One run; equal specifications are run once.

    ``nodes`` replaces the cluster's (P, D) and ``overrides`` other fields of ``ClusterSettings``.
    ``workload`` names a dataset of Table 2 by its MaxLen, or a trace.  Agents arrive all at once,
    or as a Poisson process of ``agents_per_s``, then for ``until_s``, where the run is cut.
    ``curves`` selects the curves over time of a run in which all agents start at once.

    No figure changes the rest, only what asks what the model lacks: ``generator`` replaces fields
    of ``GeneratorSettings``; ``prefill_slowdown`` multiplies every prefill time of the PEs;
    ``interleaved`` overrides whether two micro-batches hide the exchange; ``unseen_generation``
    multiplies generated tokens without lengthening later prompts.
    """

    system: System
    mode: Mode
    workload: str = "64K"
    agents: int = 0
    nodes: tuple[int, int] | None = None
    append_scale: float = 1.0
    generation_scale: float = 1.0
    agents_per_s: float | None = None
    until_s: float | None = None
    overrides: tuple[tuple[str, Any], ...] = ()
    generator: tuple[tuple[str, Any], ...] = ()
    prefill_slowdown: float = 1.0
    interleaved: bool | None = None
    unseen_generation: float = 1.0
    curves: Curves = "none"

    @property
    def title(self) -> str:
        """One line, different for every run; it names the run's cell."""
        shape = f" {self.nodes[0]}P{self.nodes[1]}D" if self.nodes else ""
        load = (
            f"{self.agents} agents"
            if self.agents_per_s is None
            else f"{self.agents_per_s:g} APS for {self.until_s:g} s"
        )
        changes = [
            f"{name} x{factor:g}"
            for name, factor in (
                ("append", self.append_scale),
                ("gen", self.generation_scale),
                ("prefill time", self.prefill_slowdown),
                ("unseen gen", self.unseen_generation),
            )
            if factor != 1
        ]
        changes += [f"{name} {_short(value)}" for name, value in (*self.overrides, *self.generator)]
        changes += [] if self.interleaved is None else [f"interleaved {self.interleaved}"]
        changes += [] if self.curves == "none" else [f"with {self.curves}"]
        words = f"{self.system.title}{shape} {self.workload} {load}"
        return ", ".join((words, *changes, self.mode.value))


def _short(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)


class EvaluationSettings(Settings, frozen=True, kw_only=True):
    """Seed, size and the choices that the paper leaves open.

    The numbers of ``quick`` are not the paper's settings.  The non-tail phase of Fig. 13 ends when
    less than ``tail_share`` of the agents are left.
    """

    seed: Annotated[int, Setting("of trajectories and arrivals", ge=0, lt=2**63)] = 1
    quick: Annotated[
        bool, Setting("small grids, for a first look; not comparable with the paper")
    ] = False
    tail: Annotated[
        Tail, Setting("distribution of turns over trajectories, which Table 2 leaves open")
    ] = "gamma"
    window_s: Annotated[float, Setting('the "small time window" of Fig. 13', ge=1e-3, le=1e4)] = 1.0
    tail_share: Annotated[
        float, Setting("of the agents, at which the tail begins", ge=0.01, le=0.99)
    ] = 0.5

    @property
    def offline_agents(self) -> tuple[int, ...]:
        """Agent batch sizes; §7.5 names the two larger ones."""
        return (64, 128) if self.quick else (512, 1024, 2048)

    @property
    def ablation_agents(self) -> tuple[int, ...]:
        """Agent batch sizes of §7.5."""
        return self.offline_agents[-2:]

    @property
    def lengths(self) -> tuple[str, ...]:
        """Datasets of Table 2, longest last."""
        return ("32K", "64K") if self.quick else ("32K", "48K", "64K")

    @property
    def scales(self) -> tuple[float, ...]:
        """Factors of append and generation length (Fig. 9)."""
        return (1.0, 2.0) if self.quick else (1.0, 2.0, 3.0, 4.0)

    @property
    def scale_up(self) -> int:
        """How many times 2P4D and its agents the large offline run has (§7.6)."""
        return 2 if self.quick else 24

    @property
    def horizon_s(self) -> float:
        """Longest online experiment; arrivals last as long."""
        return 2100.0 if self.quick else 5400.0

    def aps_step(self, system: System) -> float:
        """Spacing of the arrival rates of Fig. 10 and 11."""
        return (0.2 if self.quick else 0.05) * (4 if system == DS_27B else 1)

    def aps_limit(self, system: System) -> float:
        """Highest arrival rate tried."""
        return (0.4 if self.quick else 1.2) * (2.5 if system == DS_27B else 1)


class PlanSettings(Settings, frozen=True, kw_only=True):
    """What is searched.  Latencies are means (§7.4); a run is compared with 30 minutes before."""

    total_nodes: Annotated[
        int, Setting("nodes to divide into prefill and decode nodes", ge=2, le=MAX_NODES)
    ]
    objective: Annotated[
        Objective, Setting("JCT of all agents at once, or agents per second within the SLO")
    ] = "jct"
    ttft_slo_s: Annotated[float, Setting("bound of the mean TTFT", gt=0, le=1e6)] = 4.0
    tpot_slo_s: Annotated[float, Setting("bound of the mean TPOT", gt=0, le=1e6)] = 0.05
    horizon_s: Annotated[float, Setting("of an experiment, virtual time", gt=0, le=1e6)] = 3600.0
    first_rate: Annotated[
        float, Setting("agents per second at which bisection begins", gt=0, le=1e6)
    ] = 0.25
    precision: Annotated[
        float, Setting("relative width at which bisection ends", ge=0.001, le=1)
    ] = 0.05
    most_shapes: Annotated[int, Setting("more are searched, not all tried", ge=3)] = 15


Reading = Literal["64K", "48K"]


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters in place of the catalog's.

    ``table3_length`` is the dataset of the offline rows of Table 3 and Fig. 15.
    ``prefill_efficiency`` is by name of the model, ``prefill`` and ``decode`` are rates of the GPU,
    ``cluster`` fields of ``ClusterSettings`` of every cluster.  ``fitted`` describes for the reader
    what was fitted to which numbers.
    """

    table3_length: Reading
    prefill_efficiency: tuple[tuple[str, float], ...] = ()
    prefill: tuple[tuple[str, float], ...] = ()
    decode: tuple[tuple[str, float], ...] = ()
    cluster: tuple[tuple[str, Any], ...] = ()
    fitted: str

    @property
    def cell_suffix(self) -> str:
        """What a cell's name ends with, so that both calibrations may be in one file."""
        if self == THREE_RATES:
            return " (three rates)"
        return "" if self == AS_WRITTEN else f" (fitted at {self.table3_length})"


AS_WRITTEN = Calibration(
    table3_length="64K",
    fitted="""\
- kernel rates of prefill (one common factor), the overhead of a forward pass (0.12 s), the batch
  cap where there is no quota (1,536 tokens) and what a CNIC gives to layer blocks (39 GB/s): to the
  JCT, the largest speed-up and the three ablation steps of DS 660B on 2P4D at 64K;
- the efficiency of DS 27B's kernels beside DS 660B's (0.36): to its largest speed-up in Fig. 7;
- the time from KV in HBM to the first decode step (0.135 s) and the cost of one more request in a
  step: to TTST and TPOT of Table 3.
""",
)

THREE_RATES = Calibration(
    table3_length="64K",
    prefill_efficiency=(("ds-27b", 1.0),),
    prefill=(("efficiency", 0.865), ("exchange_layer_s", 0.0)),
    decode=(("memory_bytes_per_s", 1.92e12), ("request_layer_s", 0.0)),
    # 2,048 is the default of vLLM's `max_num_batched_tokens` where no other is known.
    cluster=(
        ("cnic_bytes_per_s", 30.7e9),
        ("batch_cap_tokens", 2048),
        ("decode_admission_s", 0.0),
    ),
    fitted="""\
Three rates are fitted to four numbers: the kernels of prefill (0.865 of the rates of *as written*,
for every model), what a CNIC gives to layer blocks (30.7 GB/s) and what a decode step reads of HBM
(1.92 TB/s) are fitted to the JCT of 2P4D, the largest speed-up of DS 660B, the second step of the
ablation and the TPOT of 2P4D.

Everything else that *as written* fits is left out. Storage NICs give the 50 GB/s of §7.2. The
overhead of a pass for the exchange, the time from KV in HBM to the first decode step and the cost
of one more request in a step are 0. DS 27B has the kernel efficiency of DS 660B. Batches without a
quota are capped at 2,048 tokens, the default of vLLM's `SchedulerConfig`; vLLM's API server takes
8,192 on large GPUs. Three choices of *as written* remain and are not counted: 3,167 s is at 64K,
the kernels have the same rates relative to each other, and a layer of a decode step has a latency
of 0.12 ms, which was chosen with the TPOT of Table 3 in view.
""",
)

AT_48K = Calibration(
    table3_length="48K",
    prefill_efficiency=(("ds-v3.2", 0.625), ("ds-27b", 0.16)),
    cluster=(
        ("snic_bytes_per_s", 32e9),
        ("snic_write_bytes_per_s", 32e9),
        ("cnic_bytes_per_s", 23.5e9),
    ),
    fitted="""\
- the efficiency of the kernels of DS 660B (0.625 of the rates above): to 3,167 s at 48K;
- what storage NICs give (32 of 50 GB/s): to DS 660B's largest speed-up;
- what a CNIC gives to layer blocks (23.5 GB/s): to the three ablation steps;
- the efficiency of DS 27B's kernels (0.16): to its largest speed-up in Fig. 7.

TTST and TPOT were not fitted again, so they are predictions in this column.
""",
)
