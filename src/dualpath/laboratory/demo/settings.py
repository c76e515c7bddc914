"""What the demo runs: its cluster, its agents, and the clusters of its modes."""

import shutil
from pathlib import Path
from typing import Annotated

import msgspec

from dualpath.core.cluster import NodesSettings, nodes_text
from dualpath.core.errors import ConfigError
from dualpath.core.modes import DEFAULT_MODE, Mode
from dualpath.core.settings import Setting
from dualpath.engine.settings import PROFILE_AUTO, PROFILE_OFF, SnicRate
from dualpath.ops.launch.settings import LocalClusterSettings

SERVED_NAME = "SmolLM2-135M-Instruct"

#: Bound of a batch's attention time.  The paper's 0.3 s is meant for GPUs; one CPU core needs
#: seconds for a few hundred tokens, and cutting prompts finer only loads their KV more often.
COMPUTE_QUOTA_S = 4.0

ROUTER_SETTINGS = Path(__file__).with_name("router.toml")


class DemoSettings(NodesSettings, frozen=True, kw_only=True):
    """The cluster of the demo and what its agents do."""

    mode: Annotated[tuple[Mode, ...], Setting("modes to compare")] = (
        Mode.BASIC,
        DEFAULT_MODE,
        Mode.ORACLE,
    )
    agents: Annotated[int, Setting("sessions replayed at once", ge=1)] = 5
    max_turns: Annotated[int, Setting("turns of every session", ge=1)] = 3
    history_tokens: Annotated[
        int, Setting("what every agent has stored before its first turn", ge=64)
    ] = 2304
    snic_bytes_per_s: SnicRate = 0.0
    scale_generate: Annotated[
        float, Setting("share of recorded answers that is generated", gt=0, le=1000)
    ] = 0.25
    max_context_tokens: Annotated[int, Setting("context of the model", ge=2)] = 5120
    seed: Annotated[int, Setting("of tokens and sampling", ge=0, lt=2**63)] = 0
    trace: Annotated[
        str, Setting("other sessions to replay; empty: agentperf-local's", metavar="FILE")
    ] = ""

    def check(self) -> None:
        """Raise ``ConfigError`` where no storage rate can be chosen."""
        super().check()
        if not self.snic_bytes_per_s and Mode.ORACLE not in self.mode:
            raise ConfigError(
                "the storage rate is chosen from Oracle's run, and {mode} has no oracle; add it "
                "or set {snic_bytes_per_s}"
            )

    @property
    def in_order(self) -> tuple[Mode, ...]:
        """The modes as they run: Oracle first, from which the storage rate is chosen."""
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
    """Return a cluster of one mode; its old logs are removed.

    ``name`` is that of its logs and traces, the mode's unless given.
    """
    logs = out / "logs" / (name or mode.value)
    shutil.rmtree(logs, ignore_errors=True)
    return LocalClusterSettings(
        model=str(model),
        storage=storage,
        nodes=demo.nodes,
        mode=mode,
        port=0,
        # In bfloat16 the batch a token is computed in can change it; float32 makes the responses
        # of the modes comparable token by token.
        dtype="float32",
        max_model_len=demo.max_context_tokens,
        compute_quota_s=COMPUTE_QUOTA_S,
        # Nothing that Basic does depends on how fast it is.
        profile=PROFILE_AUTO if mode.compute_quota else PROFILE_OFF,
        # Two clusters are up at a time, the second started ahead.
        hbm_bytes=1024 << 20,
        buffer_bytes=1024 << 20,
        # What the demo shows is reading from storage.
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
    """Return the cluster that computes what agents did before; the same blocks are stored by all.

    An engine computes on one core.  Nothing else runs then, so that every core which a mode's
    engines will have gets a prefill engine; Basic gives each the same number of prompts.
    """
    nodes = nodes_text(demo.prefill + demo.decode, 1)
    many = msgspec.structs.replace(demo, nodes=nodes)
    return cluster_settings(Mode.BASIC, many, model, storage, out, 0.0, name)
