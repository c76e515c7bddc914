"""Attention times of real vLLM engines on CPUs: the prediction's error, and balance in a group.

The compute quota of §6.2 predicts the attention time of each forward pass from a few passes that
were timed at start.  ``quota-error`` compares prediction and measurement for each kind of
attention, ``attention-balance`` the ranks of a data-parallel group that compute in lock step
(Fig. 14).  Sparse attention with an indexer does not run on CPUs: its error is that of the
catalog's costs of a GPU, where indexer and attention have different throughputs.
"""

import asyncio
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from dualpath.core.cluster import Role
from dualpath.core.errors import EngineLostError
from dualpath.core.request import Round, Trajectory
from dualpath.core.settings import Setting, Settings
from dualpath.engine.passes.attention_times import ATTENTION_TRACK
from dualpath.launch.commands import VLLM, Commands
from dualpath.launch.local_cluster import LocalCluster
from dualpath.launch.settings import LocalClusterSettings
from dualpath.policy.batching import AttentionGeometry, chunk_flops, fit
from dualpath.router.settings import RouterSettings
from dualpath.workload.columns.generator import DATASETS, GeneratorSettings, generate
from dualpath.workload.conversation.token_session import TokenSession
from dualpath.workload.replay.client import ReplayOptions, replay
from dualpath_lab.emulated.commands import emulated_commands
from dualpath_lab.emulated.settings import EmulatedOptions
from dualpath_lab.models.random_models import (
    MLA_COMPILATION_CONFIG,
    TinyKind,
    make_tiny_model,
)
from dualpath_sim.catalog.costs import single_engine_costs
from dualpath_sim.harness.experiment import Experiment, Progress, Stage, one_stage
from dualpath_sim.harness.numbers import Column, Numbers, numbers_page

_MEMORY_BYTES = 256 << 20
_MAX_MODEL_LEN = 4096


class Kind(NamedTuple):
    """A model with the arguments with which vLLM's CPU build runs it."""

    model: TinyKind
    block_tokens: int = 64
    vllm_args: tuple[str, ...] = ()


KINDS = {
    "full": Kind("qwen2"),
    "window": Kind("gemma3"),
    "latent": Kind(
        "deepseek_v2",
        block_tokens=16,
        vllm_args=(
            *("--compilation-config", json.dumps(MLA_COMPILATION_CONFIG)),
            *("--attention-backend", "CPU_MLA"),
        ),
    ),
}
#: Not run: computed from the catalog's costs.
SPARSE = "sparse with indexer, modelled"


class AttentionSettings(Settings, frozen=True, kw_only=True):
    """The agents: each turn appends random tokens to its context, and generates two."""

    agents: Annotated[int, Setting("agents, all at once", ge=1)] = 6
    turns: Annotated[int, Setting("turns of an agent", ge=1)] = 6
    append: Annotated[
        tuple[int, int], Setting("least and most tokens that a turn appends", metavar="LOW,HIGH")
    ] = (64, 512)
    quota_s: Annotated[
        float, Setting("compute quota; 0: none, each prompt is computed in one pass", ge=0)
    ] = 0.3
    seed: Annotated[int, Setting("random seed of lengths and tokens", ge=0)] = 0
    repeat: Annotated[int, Setting("number of repetitions, interleaved", ge=1, le=100)] = 1


def agents_of(settings: AttentionSettings) -> list[TokenSession]:
    """Return the agents; equal settings give equal ones."""
    rng, (low, high) = np.random.default_rng([settings.seed, 21]), settings.append
    return [
        TokenSession(
            Trajectory(
                f"agent-{agent}",
                tuple(Round(int(rng.integers(low, high + 1)), 2) for _ in range(settings.turns)),
            )
        )
        for agent in range(settings.agents)
    ]


class TracedPass(NamedTuple):
    """A pass of a prefill engine: when it ended, and its attention time, in seconds."""

    end_s: float
    duration_s: float
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return abs(self.predicted_s - self.measured_s) / self.measured_s


def traced_passes(path: Path) -> list[TracedPass]:
    """Return the passes in an engine's trace whose attention was measured, in order of time."""
    found = [
        TracedPass((event["ts"] + event["dur"]) / 1e6, event["dur"] / 1e6, **event["args"])
        for event in json.loads(path.read_text())["traceEvents"]
        if event["tid"] == ATTENTION_TRACK
    ]
    return sorted(found)


def run_agents(
    settings: AttentionSettings, kind: Kind | None, ranks: int = 1, speedup: float = 1.0
) -> list[list[TracedPass]]:
    """Replay the agents on 1P1D and return the passes of each prefill rank.

    Engines are vLLM's with the model of ``kind``, or without one emulated, ``speedup`` times as
    fast as a GPU.  Raises ``EngineLostError`` if a turn fails.
    """
    model = make_tiny_model(kind.model) if kind is not None else _EMULATED_MODEL
    commands = VLLM if kind is not None else _emulated(ranks, speedup)
    chosen = kind or Kind("qwen2")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster_settings = LocalClusterSettings(
            model=str(model),
            storage=str(folder / "storage"),
            port=0,
            nodes="1P1D",
            prefill_dp=ranks,
            dtype="float32",
            max_model_len=_MAX_MODEL_LEN,
            block_tokens=chosen.block_tokens,
            hbm_bytes=_MEMORY_BYTES,
            buffer_bytes=_MEMORY_BYTES,
            compute_quota_s=settings.quota_s,
            trace_dir=str(folder / "traces"),
            log_dir=str(folder / "logs"),
            vllm_args=chosen.vllm_args,
        )
        with LocalCluster(cluster_settings, commands=commands) as cluster:
            engines = [
                engine["engine_id"]
                for engine in cluster.status()["engines"]
                if engine["role"] == Role.PREFILL.value
            ]
            options = ReplayOptions(seed=settings.seed)
            found = asyncio.run(replay(agents_of(settings), cluster.endpoint, options))
        if found.failed:
            errors = [turn.error for turn in found.turns if turn.error]
            raise EngineLostError(f"{len(errors)} turns failed, the first with: {errors[:1]}")
        return [traced_passes(folder / "traces" / f"{engine}.json") for engine in sorted(engines)]


_EMULATED_MODEL, _EMULATED_GPU = "ds-27b", "hopper"


def _emulated(ranks: int, speedup: float) -> Commands:
    """Return the commands of emulated engines: times of a GPU, and little KV to move."""
    options = EmulatedOptions(
        model=_EMULATED_MODEL,
        gpu=_EMULATED_GPU,
        layers=4,
        kv_bytes_per_token=256.0,
        hbm_bytes=_MEMORY_BYTES,
        speedup=speedup,
        dp_lock_step=ranks > 1,
    )
    return emulated_commands(options, RouterSettings(dram_tier=False))


# ------------------------------------------------------------------------------------ quota error


def error_numbers(passes: Sequence[TracedPass]) -> Numbers:
    """Return the error over passes, in shares, and the attention times in seconds.

    The error of the form is that of predictions that are right in sum: what is left if the machine
    was as busy at start, when passes were timed, as later.
    """
    measured_s = sum(one.measured_s for one in passes)
    share = sum(one.predicted_s for one in passes) / measured_s
    errors = [one.error for one in passes]
    form = [one._replace(predicted_s=one.predicted_s / share).error for one in passes]
    return {
        "passes": len(passes),
        "error_mean": statistics.fmean(errors),
        "error_p95": float(np.percentile(errors, 95)),
        "form_mean": statistics.fmean(form),
        "form_p95": float(np.percentile(form, 95)),
        "measured_s": measured_s,
        "predicted_share": share,
    }


#: Sizes of the passes that an engine times at start (``vllm.profiling``).
_PROFILED_TOKENS, _PROFILED_CONTEXTS = 512, (0, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def modelled_sparse(model: str = "ds-v3.2", gpu: str = "hopper") -> list[TracedPass]:
    """Return the turns of the 32K dataset as passes of a sparse model on a GPU of the catalog.

    Measured is what the catalog's costs say, predicted what an engine fits to the passes that it
    times at start: one throughput for attention and indexer together.
    """
    costs = single_engine_costs(model, gpu, 1).prefill
    # Attention of DeepSeek-V3.2: the absorbed form over 512 + 64 and 512 values, the indexer's
    # 64 heads of 128 values.
    layers, latent = 61, AttentionGeometry.from_heads(61, 128, 576, 512).pair_flops
    geometry = AttentionGeometry(latent, 0.0, costs.window_tokens, 2.0 * layers * 64 * 128)

    def measured_s(cached: int, bsz: int) -> float:
        rates = (costs.pair_s, costs.index_pair_s, 0.0, costs.window_tokens)
        return costs.attention_batch_s + chunk_flops(*rates, cached, bsz)

    profiled = [(cached, _PROFILED_TOKENS) for cached in _PROFILED_CONTEXTS]
    estimate = fit([(geometry.flops(*chunk), measured_s(*chunk)) for chunk in profiled])
    columns = generate(DATASETS["32K"], 0, GeneratorSettings(trajectories=20))
    context, found = 0, []
    first = set(columns.first_round.tolist())
    turns = zip(columns.append_tokens.tolist(), columns.generated_tokens.tolist(), strict=True)
    for number, (append, generated) in enumerate(turns):
        context = 0 if number in first else context
        predicted_s = estimate.seconds(geometry.flops(context, append))
        found.append(TracedPass(0.0, 0.0, predicted_s, measured_s(context, append)))
        context += append + generated
    return found


_ERRORS = (
    Column("passes", "passes", "{:.0f}"),
    Column("error, mean", "error_mean", "{:.1%}", tolerance=0.5),
    Column("error, p95", "error_p95", "{:.1%}"),
    Column("predicted / measured, in sum", "predicted_share", "{:.2f}"),
    Column("error if right in sum, mean", "form_mean", "{:.1%}"),
    Column("error if right in sum, p95", "form_p95", "{:.1%}"),
    Column("attention, s", "measured_s", "{:.2f}"),
)


class QuotaErrorSettings(AttentionSettings, frozen=True, kw_only=True):
    """The kinds of attention."""

    kinds: Annotated[
        tuple[str, ...], Setting(f"kinds of attention: {', '.join(KINDS)}", metavar="KIND,…")
    ] = tuple(KINDS)


def _error_stages(
    settings: QuotaErrorSettings, progress: Progress
) -> Iterator[Stage[str, Numbers]]:
    def run(kind: str, number: int) -> Numbers:
        if kind == SPARSE:
            return error_numbers(modelled_sparse())
        (passes,) = run_agents(settings, KINDS[kind])
        return error_numbers(passes)

    yield from one_stage({kind: kind for kind in (*settings.kinds, SPARSE)}, run)


def _setting_lines(settings: AttentionSettings) -> tuple[str, ...]:
    return (
        "Real vLLM engines on CPU, 1P1D, tiny models with random weights in float32.",
        _agent_line(settings),
    )


def _agent_line(settings: AttentionSettings) -> str:
    return (
        f"{settings.agents} agents of {settings.turns} turns at once; a turn appends "
        f"{settings.append[0]} to {settings.append[1]} tokens and generates 2. Compute quota "
        f"{settings.quota_s:g} s. Seed {settings.seed}."
    )


QUOTA_ERROR = Experiment(
    name="quota-error",
    title="Error of the predicted attention time of forward passes, on CPUs",
    settings=QuotaErrorSettings(),
    result=Numbers,
    stages=_error_stages,
    draw=numbers_page("Relative error over passes", _ERRORS, "attention", _setting_lines),
    summary=lambda numbers: f"{numbers['passes']:.0f} passes, error {numbers['error_mean']:.1%}",
)


# ------------------------------------------------------------------------------ attention balance


def steps_of(ranks: Sequence[Sequence[TracedPass]]) -> list[list[TracedPass | None]]:
    """Return the forward passes of a group in lock step: of each rank its pass, None if it idled.

    Passes of one step end at the same time: within half of the shortest of them.
    """
    ended = sorted(
        ((one.end_s, rank, one) for rank, passes in enumerate(ranks) for one in passes),
        key=lambda each: each[:2],
    )
    steps: list[list[TracedPass | None]] = []
    last_s = -1.0
    for end_s, rank, one in ended:
        joins = steps and steps[-1][rank] is None
        shortest_s = min((p.duration_s for p in [*steps[-1], one] if p), default=0) if steps else 0
        if not joins or end_s - last_s > shortest_s / 2:
            steps.append([None] * len(ranks))
            last_s = end_s
        steps[-1][rank] = one
    return steps


def balance_numbers(ranks: Sequence[Sequence[TracedPass]]) -> Numbers:
    """Return max/avg of the ranks' attention times over steps in which no rank idled (Fig. 14)."""
    steps = steps_of(ranks)
    full = [[one.measured_s for one in step if one] for step in steps if all(step)]
    ratios = [max(times) / statistics.fmean(times) for times in full]
    numbers: Numbers = {"steps": len(steps), "full_steps": len(full)}
    if ratios:
        numbers |= {
            "ratio_mean": statistics.fmean(ratios),
            "ratio_p95": float(np.percentile(ratios, 95)),
        }
    return numbers


_BALANCE = (
    Column("passes of the group", "steps", "{:.0f}"),
    Column("no rank idle", "full_steps", "{:.0f}"),
    Column("max/avg, mean", "ratio_mean", "{:.2f}", tolerance=0.1, any_machine=True),
    Column("max/avg, p95", "ratio_p95", "{:.2f}"),
)
#: vLLM's CPU build needs this patch for groups whose ranks share experts.
_PATCH = "tests.e2e.cpu_experts.MendedCpuExperts"
_EXPERTS = Kind("qwen3_moe", vllm_args=("--worker-extension-cls", _PATCH))


class BalanceSettings(AttentionSettings, frozen=True, kw_only=True):
    """A prefill group whose ranks compute in lock step, with the quota and without one."""

    agents: Annotated[int, Setting("agents, all at once", ge=1)] = 24
    append: Annotated[
        tuple[int, int], Setting("least and most tokens that a turn appends", metavar="LOW,HIGH")
    ] = (256, 4096)
    ranks: Annotated[int, Setting("ranks of the group", ge=2, le=8)] = 4
    speedup: Annotated[
        float,
        Setting(
            "factor of the emulated computing speed; a slow engine has more requests that wait",
            gt=0,
            le=1e6,
        ),
    ] = 1.0
    vllm: Annotated[
        bool,
        Setting(
            "use vLLM engines of a tiny model with experts instead of emulated engines; from the "
            "repository's root"
        ),
    ] = False


def _balance_stages(
    settings: BalanceSettings, progress: Progress
) -> Iterator[Stage[float, Numbers]]:
    def run(quota_s: float, number: int) -> Numbers:
        chosen = msgspec.structs.replace(settings, quota_s=quota_s)
        kind = _EXPERTS if settings.vllm else None
        return balance_numbers(run_agents(chosen, kind, settings.ranks, settings.speedup))

    quotas = {f"quota {settings.quota_s:g} s": settings.quota_s, "no quota": 0.0}
    yield from one_stage(quotas, run)


def _balance_lines(settings: BalanceSettings) -> tuple[str, ...]:
    engines = (
        f"real vLLM engines on CPU, a tiny model with experts ({_EXPERTS.model})"
        if settings.vllm
        else f"emulated engines in lock step, times of {_EMULATED_MODEL} on {_EMULATED_GPU}, "
        f"{settings.speedup:g} times as fast"
    )
    return (
        f"A prefill group of {settings.ranks} ranks and one decode engine; {engines}.",
        _agent_line(settings),
    )


ATTENTION_BALANCE = Experiment(
    name="attention-balance",
    title="Balance of attention times in a data-parallel group (Fig. 14)",
    settings=BalanceSettings(),
    result=Numbers,
    stages=_balance_stages,
    draw=numbers_page(
        "Attention time of a group's ranks, max/avg in each pass", _BALANCE, "", _balance_lines
    ),
    summary=lambda numbers: f"max/avg {numbers.get('ratio_mean', 1.0):.2f}",
)
