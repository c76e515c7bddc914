"""`dualpath demo`: real agent sessions on a real small model, Basic against DualPath and Oracle.

Storage reads of every engine are throttled to a stated rate, because on one machine the page cache
would otherwise make loading free: the throttle stands for the storage NIC of a node, and makes
loading the bottleneck as it is in the paper.
"""

import argparse
import asyncio
import importlib.util
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dualpath.cli.settings import add_settings, flag_settings
from dualpath.core.cluster import NodesSettings
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.core.settings import Setting
from dualpath.engine.settings import SnicRate
from dualpath.ops.launch.settings import LocalClusterSettings
from dualpath.report.files import require_extra, write_page

if TYPE_CHECKING:
    from dualpath.laboratory.workload.conversation.session import Session
    from dualpath.laboratory.workload.replay.result import ReplayResult

SESSIONS_PACKAGE = "agentperf_local"
SERVED_NAME = "SmolLM2-135M-Instruct"

#: Bound of a batch's attention time.  The paper's 0.3 s is meant for GPUs; one CPU core needs
#: seconds for a few hundred tokens, and cutting prompts finer only loads their KV more often.
COMPUTE_QUOTA_S = 4.0


class DemoSettings(NodesSettings, frozen=True, kw_only=True):
    """The cluster of the demo and what its agents do."""

    mode: Annotated[tuple[Mode, ...], Setting("modes to compare")] = (
        Mode.BASIC,
        Mode.DUALPATH,
        Mode.ORACLE,
    )
    agents: Annotated[int, Setting("sessions replayed at once", ge=1)] = 6
    max_turns: Annotated[int, Setting("turns of every session", ge=1)] = 7
    snic_bytes_per_s: SnicRate = 20e6
    scale_generate: Annotated[
        float, Setting("share of recorded answers that is generated", gt=0, le=1000)
    ] = 0.25
    max_context_tokens: Annotated[int, Setting("context of the model", ge=2)] = 5120
    seed: Annotated[int, Setting("of tokens and sampling", ge=0, lt=2**63)] = 0
    trace: Annotated[
        str, Setting("other sessions to replay; empty: agentperf-local's", metavar="FILE")
    ] = ""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath demo`."""
    parser = subparsers.add_parser(
        "demo",
        help="compare Basic, DualPath and Oracle on real sessions, on this machine",
        allow_abbrev=False,
    )
    add_settings(parser, DemoSettings)
    parser.add_argument("--out", default="runs/demo", help="folder of table, page and results")


def run(args: argparse.Namespace) -> int:
    """Run all modes and compare them; returns 1 if any turn failed.

    Raises ``ConfigError`` or ``EngineLostError``; nothing is left running or stored then.
    """
    demo = flag_settings(args, DemoSettings)
    require_extra("the demo's page")
    out = _writable(Path(args.out))
    from dualpath.laboratory.models.smollm2 import prepare_smollm2

    _say("preparing SmolLM2-135M-Instruct (converted once, then cached)")
    model = prepare_smollm2()
    sessions, names = sessions_of(demo.trace)
    sessions = fitting_sessions(sessions, model, demo)
    results = [_run_mode(mode, demo, model, sessions, names, out) for mode in demo.mode]
    _report(results, out)
    failed = sum(result.summary.turns_failed for result in results)
    return 1 if failed else 0


def _run_mode(
    mode: Mode,
    demo: DemoSettings,
    model: Path,
    sessions: "Sequence[Session]",
    names: str,
    out: Path,
) -> "ReplayResult":
    from dualpath.laboratory.workload.conversation.text_encoder import load_encoder
    from dualpath.laboratory.workload.replay.client import replay
    from dualpath.laboratory.workload.replay.options import ReplayOptions
    from dualpath.laboratory.workload.replay.progress import ConsoleProgress
    from dualpath.laboratory.workload.replay.result import write_result
    from dualpath.ops.launch.local_cluster import LocalCluster

    options = ReplayOptions(
        agents=demo.agents,
        seed=demo.seed,
        max_turns=demo.max_turns,
        max_context_tokens=demo.max_context_tokens,
        scale_generate=demo.scale_generate,
        label=mode.value,
        trace=names,
        trace_format="text sessions",
    )
    storage = tempfile.mkdtemp(prefix=f"dualpath-demo-{mode.value}-")
    try:
        settings = cluster_settings(mode, demo, model, storage, out)
        with LocalCluster(settings, _say) as cluster, ConsoleProgress(mode.value) as progress:
            result = asyncio.run(
                replay(
                    sessions,
                    cluster.endpoint,
                    options,
                    encode=load_encoder(model),
                    progress=progress,
                )
            )
    finally:
        shutil.rmtree(storage, ignore_errors=True)
    write_result(result, out / f"{mode.value}.json")
    return result


def cluster_settings(
    mode: Mode, demo: DemoSettings, model: Path, storage: str, out: Path
) -> LocalClusterSettings:
    """Return the cluster of one mode of the demo; its old logs are removed."""
    logs = out / "logs" / mode.value
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
        hbm_bytes=1536 << 20,
        buffer_bytes=2048 << 20,
        # What the demo shows is reading from storage.
        dram_tier=False,
        snic_bytes_per_s=demo.snic_bytes_per_s,
        served_model_names=(SERVED_NAME,),
        trace_dir=str(out / "traces" / mode.value),
        log_dir=str(logs),
    )


def sessions_of(trace: str) -> "tuple[list[Session], str]":
    """Return the sessions to replay and where they come from."""
    from dualpath.laboratory.workload.formats import read_trace

    if trace:
        return read_trace(trace), trace
    spec = importlib.util.find_spec(SESSIONS_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the sessions of the package agentperf-local are not installed; run `make install` or "
            "name other sessions with --trace"
        )
    folder = Path(spec.submodule_search_locations[0]) / "data" / "replays"
    return read_trace(folder), SESSIONS_PACKAGE


def fitting_sessions(sessions: "list[Session]", model: Path, demo: DemoSettings) -> "list[Session]":
    """Return the sessions whose first prompt leaves half of the context for further turns."""
    from dualpath.laboratory.workload.conversation.text_encoder import load_encoder
    from dualpath.laboratory.workload.conversation.text_session import TextSession

    encode = load_encoder(model)

    def first_prompt_tokens(session: TextSession) -> int:
        return sum(len(encode(message.text)) for message in session.text_turns[0].messages)

    limit = demo.max_context_tokens // 2
    fitting = [
        session
        for session in sessions
        if not isinstance(session, TextSession) or first_prompt_tokens(session) <= limit
    ]
    if not fitting:
        raise ConfigError(
            f"none of {len(sessions)} sessions starts with at most {limit} tokens, half of "
            f"{{max_context_tokens}} {demo.max_context_tokens}; raise it or name other sessions "
            "with --trace"
        )
    _say(f"{len(fitting)} of {len(sessions)} sessions start with at most {limit} tokens")
    return fitting


def _report(results: "list[ReplayResult]", out: Path) -> None:
    from dualpath.laboratory.workload.replay.report import compare
    from dualpath.report.text import print_report

    report = compare(results, title="dualpath demo")
    print_report(report)
    page = out / "report.html"
    write_page(report, page)
    _say(f"the same with plots: {page}; engine traces and logs beside it")


def _writable(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output folder {str(path)!r} cannot be made ({error.strerror}); choose another with "
            "--out"
        ) from error
    return path


def _say(text: str) -> None:
    print(f"dualpath: {text}", flush=True)
