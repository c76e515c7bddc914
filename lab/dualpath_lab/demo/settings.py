"""Settings of the demo, and of the clusters of its modes."""

import shutil
from pathlib import Path
from typing import Annotated

import msgspec

from dualpath.core.cluster import NodesSettings, nodes_text
from dualpath.core.errors import ConfigError
from dualpath.core.modes import DEFAULT_MODE, Mode
from dualpath.core.settings import Setting
from dualpath.engine.settings import PROFILE_AUTO, PROFILE_OFF, SnicRate
from dualpath.launch.settings import LocalClusterSettings
from dualpath.workload.formats import SkipBroken

SERVED_NAME = "SmolLM2-135M-Instruct"

#: Compute quota in seconds of attention per batch.  The paper's 0.3 s is for GPUs.  One CPU core
#: needs seconds for a few hundred tokens, and smaller chunks only load their KV more often.
COMPUTE_QUOTA_S = 4.0

ROUTER_SETTINGS = Path(__file__).with_name("router.toml")


class DemoSettings(NodesSettings, frozen=True, kw_only=True):
    """The cluster of the demo and its agents."""

    mode: Annotated[tuple[Mode, ...], Setting("modes to compare")] = (
        Mode.BASIC,
        DEFAULT_MODE,
        Mode.ORACLE,
    )
    agents: Annotated[int, Setting("sessions replayed concurrently", ge=1)] = 5
    max_turns: Annotated[int, Setting("turns of every session", ge=1)] = 3
    history_tokens: Annotated[
        int, Setting("tokens of context that each agent has stored before its first turn", ge=64)
    ] = 2304
    snic_bytes_per_s: SnicRate = 0.0
    scale_generate: Annotated[
        float, Setting("generated share of the recorded answers' tokens", gt=0, le=1000)
    ] = 0.25
    max_context_tokens: Annotated[int, Setting("longest context in tokens", ge=2)] = 5120
    seed: Annotated[int, Setting("seed of tokens and sampling", ge=0, lt=2**63)] = 0
    trace: Annotated[
        str, Setting("other sessions to replay; empty: agentperf-local's", metavar="FILE")
    ] = ""
    skip_broken: SkipBroken = False

    def check(self) -> None:
        """Raise ``ConfigError`` if the storage rate cannot be chosen."""
        super().check()
        if not self.snic_bytes_per_s and Mode.ORACLE not in self.mode:
            raise ConfigError(
                "the storage rate is chosen from Oracle's run, but {mode} does not contain oracle; "
                "add it or set {snic_bytes_per_s}"
            )

    @property
    def in_order(self) -> tuple[Mode, ...]:
        """The modes in the order of their runs, with Oracle first to choose the storage rate."""
        return tuple(sorted(self.mode, key=lambda mode: mode is not Mode.ORACLE))


def cluster_settings(
    mode: Mode,
    demo: DemoSettings,
    model: Path,
    storage: str,
    out: Path,
    snic_bytes_per_s: float,
    name: str = "",
) -> LocalClusterSettings:
    """Return the settings of a cluster of one mode, and remove its old logs.

    ``name`` is the name of its logs and traces, by default the mode's.
    """
    logs = out / "logs" / (name or mode.value)
    shutil.rmtree(logs, ignore_errors=True)
    return LocalClusterSettings(
        model=str(model),
        storage=storage,
        nodes=demo.nodes,
        mode=mode,
        port=0,
        # In bfloat16 a token can depend on the batch in which it is computed; with float32 the
        # responses of the modes can be compared token by token.
        dtype="float32",
        max_model_len=demo.max_context_tokens,
        compute_quota_s=COMPUTE_QUOTA_S,
        # Basic does not use the measured costs.
        profile=PROFILE_AUTO if mode.compute_quota else PROFILE_OFF,
        # Two clusters run at a time, because the next one is started ahead.
        hbm_bytes=1024 << 20,
        buffer_bytes=1024 << 20,
        # The demo is about reads from storage.
        dram_tier=False,
        snic_bytes_per_s=snic_bytes_per_s,
        served_model_names=(SERVED_NAME,),
        config_file=str(ROUTER_SETTINGS),
        trace_dir=str(out / "traces" / (name or mode.value)),
        log_dir=str(logs),
    )


def history_settings(
    demo: DemoSettings, model: Path, storage: str, out: Path, name: str
) -> LocalClusterSettings:
    """Return the settings of the cluster that computes and stores the agents' histories.

    An engine computes on one core, and nothing else runs at that time, so there is one prefill
    engine for each core that a mode's engines will use.  Basic distributes the prompts evenly.
    The stored blocks are the same as those of the modes' engines.
    """
    nodes = nodes_text(demo.prefill + demo.decode, 1)
    many = msgspec.structs.replace(demo, nodes=nodes)
    return cluster_settings(Mode.BASIC, many, model, storage, out, 0.0, name)
