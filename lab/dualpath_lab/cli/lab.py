"""`dualpath lab`: an emulated cluster on this machine, with shaped links per node."""

import argparse
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dualpath.cli.output import add_json_argument, print_progress, wrote_json
from dualpath.cli.settings import Part, add_parts, add_settings, configuration, flag_settings
from dualpath.cli.signals import sigterm_as_interrupt
from dualpath.report.model import Notes, Table
from dualpath_lab.cli import LAB
from dualpath_lab.nodes.settings import LabSettings
from dualpath_sim.cli.experiments import Entry, Group, LazyParser

if TYPE_CHECKING:
    from dualpath_lab.nodes.cluster import LabState

# --------------------------------------------------------------------------------- lab experiments
# `dualpath lab run` and `dualpath lab bench`: experiments on temporary labs.

_EXPERIMENTS = "dualpath_lab.experiments"
LAB_EXPERIMENTS = {
    "jct": Entry(
        "job completion time, link utilization and balance of every mode, interleaved",
        f"{_EXPERIMENTS}.jct:JCT",
    ),
    "online": Entry(
        "the highest arrival rate of agents under an SLO, by bisection, and latencies",
        f"{_EXPERIMENTS}.online:ONLINE",
    ),
    "simulator": Entry(
        "measured job completion times compared with the simulator's",
        f"{_EXPERIMENTS}.simulator_comparison:SIMULATOR",
    ),
    "isolation": Entry(
        "latency of model communication during KV transfers, with and without QoS",
        f"{_EXPERIMENTS}.isolation:ISOLATION",
    ),
    "data-plane": Entry(
        "storage reads and transfers compared with fio and raw NIXL, CPU time per GB",
        f"{_EXPERIMENTS}.data_plane:DATA_PLANE",
    ),
    "dram": Entry(
        "job completion time without and with a DRAM cache, by its size",
        f"{_EXPERIMENTS}.dram_tier:DRAM",
    ),
    "sealed": Entry(
        "job completion time with plain, authenticated and encrypted blocks",
        f"{_EXPERIMENTS}.sealed_blocks:SEALED",
    ),
    "roles": Entry(
        "role changes under a load that shifts from prefill to decode, measured and simulated",
        f"{_EXPERIMENTS}.roles:ROLES",
    ),
}
_BENCHMARKS = "dualpath_lab.benchmarks"
#: Those that a checkout of the repository has and the wheel of the lab has not.
BENCHMARKS = {
    "peers": Entry(
        "job completion time of DualPath and of other stacks on one lab",
        f"{_BENCHMARKS}.peers.comparison:PEERS_EXPERIMENT",
    ),
    "peers-matrix": Entry(
        "the same in 36 regimes of agents, storage rates, DRAM and pauses",
        f"{_BENCHMARKS}.peers.matrix:PEERS_MATRIX",
    ),
    "storage-read": Entry(
        "methods to read stored blocks: threads, pieces, io_uring, NIXL",
        f"{_BENCHMARKS}.storage_read:STORAGE_READ",
    ),
    "s3-read": Entry("S3 clients that read stored blocks", f"{_BENCHMARKS}.s3_read:S3_READ"),
    "s3-link": Entry(
        "how well a node uses a shaped storage NIC to an S3 server",
        f"{_BENCHMARKS}.s3_link:S3_LINK",
    ),
    "storage-quota": Entry(
        "a storage's janitor: hits compared with an ideal LRU, its CPU time, its start",
        f"{_BENCHMARKS}.storage_quota:STORAGE_QUOTA",
    ),
    "storage-codec": Entry(
        "compression of stored blocks: ratio and rates of one core",
        f"{_BENCHMARKS}.storage_codec:STORAGE_CODEC",
    ),
    "sealed-cpu": Entry(
        "CPU time of authenticating and encrypting blocks",
        f"{_BENCHMARKS}.sealed_blocks:SEALED_CPU",
    ),
    "lookups": Entry(
        "stat calls and time of look-ups, and hits while blocks are written",
        f"{_BENCHMARKS}.lookup_cost:LOOKUPS",
    ),
    "eviction": Entry(
        "CPU time of an eviction by the number of cached chains",
        f"{_BENCHMARKS}.eviction_cost:EVICTION",
    ),
    "block-keys": Entry(
        "CPU time of the block keys of a prompt", f"{_BENCHMARKS}.block_key_speed:BLOCK_KEYS"
    ),
    "transfers": Entry(
        "latency, rate and CPU time of transfers between two processes",
        f"{_BENCHMARKS}.transfer_speed:TRANSFERS",
    ),
    "one-machine": Entry(
        "transfers between engines of one machine: shared memory beside NIXL",
        f"{_BENCHMARKS}.transfer_speed:ONE_MACHINE",
    ),
    "scheduler-speed": Entry(
        "assignments per CPU-second of the request scheduler",
        f"{_BENCHMARKS}.scheduler_speed:SCHEDULER_SPEED",
    ),
    "metrics": Entry(
        "CPU time of metrics and traces in the router", f"{_BENCHMARKS}.metrics_cost:METRICS"
    ),
    "control-flood": Entry(
        "memory that unregistered peers can make a control socket use",
        f"{_BENCHMARKS}.control_flood:CONTROL_FLOOD",
    ),
    "memory": Entry(
        "memory of router, front end and engines over many requests of mixed kinds",
        f"{_BENCHMARKS}.memory_over_requests:MEMORY",
    ),
    "two-legs": Entry(
        "job completion time behind a proxy that sends two legs, against the router",
        f"{_BENCHMARKS}.two_legs:TWO_LEGS",
    ),
    "demo-prediction": Entry(
        "the demo's job completion times, predicted by the simulator and measured",
        f"{_BENCHMARKS}.demo_prediction:DEMO_PREDICTION",
    ),
    "ttft": Entry(
        "TTFT of a 1P1D cluster of vLLM engines against one vLLM server",
        f"{_BENCHMARKS}.overhead.first_token:TTFT",
    ),
    "router": Entry(
        "CPU time of the router per request and per token, and its share of TTFT",
        f"{_BENCHMARKS}.overhead.router_cost:ROUTER_COST",
    ),
    "streams": Entry(
        "many concurrent streams through the router",
        f"{_BENCHMARKS}.overhead.router_cost:STREAMS",
    ),
    "scheduler": Entry(
        "CPU time and messages of a scheduler process per request",
        f"{_BENCHMARKS}.overhead.scheduler_cost:SCHEDULER_COST",
    ),
    "front-ends": Entry(
        "CPU time of one and of two front ends, latency and memory of many streams",
        f"{_BENCHMARKS}.overhead.front_ends:FRONT_ENDS",
    ),
    "killed-scheduler": Entry(
        "time without placements after a crash of the scheduler",
        f"{_BENCHMARKS}.overhead.killed_scheduler:KILLED_SCHEDULER",
    ),
    "passes": Entry(
        "idle time of a PE's GPU between forward passes, emulated, without a lab",
        f"{_BENCHMARKS}.overhead.between_passes:PASSES",
    ),
    "traces": Entry(
        "the same, from traces of emulated engines on a lab",
        f"{_BENCHMARKS}.overhead.between_passes:TRACES",
    ),
    "stored": Entry(
        "TTFT of a fully stored prompt compared with its transfers",
        f"{_BENCHMARKS}.overhead.stored_prompt:STORED",
    ),
    "quota-error": Entry(
        "error of the predicted attention time of real vLLM engines' passes, by kind of attention",
        f"{_BENCHMARKS}.attention_times:QUOTA_ERROR",
    ),
    "attention-balance": Entry(
        "attention times of the ranks of a data-parallel group, max/avg in each pass",
        f"{_BENCHMARKS}.attention_times:ATTENTION_BALANCE",
    ),
    "gpu-prefill": Entry(
        "layerwise prefill on a GPU with KV streamed from pinned DRAM",
        f"{_BENCHMARKS}.gpu.experiments:GPU_PREFILL",
    ),
    "gpu-copies": Entry(
        "many small copies between pinned DRAM and a GPU's HBM",
        f"{_BENCHMARKS}.gpu.experiments:GPU_COPIES",
    ),
    "simulator-speed": Entry(
        "CPU time and memory of the simulator, beside Dynamo's",
        f"{_BENCHMARKS}.simulator_speed:SIMULATOR_SPEED",
    ),
    "split-reads": Entry(
        "reads of one side compared with split reads, simulated",
        f"{_BENCHMARKS}.split_reads:SPLIT_READS",
    ),
    "open-decisions": Entry(
        "decisions that the paper leaves open, each changed separately, simulated",
        f"{_BENCHMARKS}.open_decisions:OPEN_DECISIONS",
    ),
}
#: The experiments create their own labs; name and nodes of these are not settings.
BENCH = Group(
    LAB_EXPERIMENTS | (BENCHMARKS if find_spec(_BENCHMARKS) else {}),
    {LabSettings: Part(LAB, "lab", without=("name", "nodes"))},
)
_RUN_ENTRY = Entry("create a lab, replay agents on it, remove it", f"{_EXPERIMENTS}.jct:RUN")
_RUN_GROUP = Group({"run": _RUN_ENTRY}, {LabSettings: Part(LAB, "lab")})

_RUN_DESCRIPTION = """Create a lab, run agents on it in each of the modes, print job completion
times
and link utilization, remove the lab. Engines are emulated: real scheduler, storage, buffers and
transfers; every KV block is verified at its destination. Exit code 1: the machine was too busy."""


def add_run_parser(actions: "argparse._SubParsersAction[LazyParser]") -> None:
    """Add `dualpath lab run`."""
    parser = actions.add_parser("run", help=_RUN_ENTRY.help, description=_RUN_DESCRIPTION)
    parser.add_arguments = lambda made: _RUN_GROUP.add_arguments(
        made, _RUN_ENTRY.load(), named=False
    )


def add_bench_parser(actions: "argparse._SubParsersAction[LazyParser]") -> None:
    """Add `dualpath lab bench`."""
    parser = actions.add_parser(
        "bench",
        help="run experiments on temporary labs, and benchmarks of single parts",
        description="Experiments on temporary labs and, in a checkout of the repository, "
        "benchmarks of single parts; each prints a report and, with --out, writes it as Markdown, "
        "PNG and JSON. With --check it repeats a recorded one and compares. The machine must be "
        "otherwise idle.",
    )
    BENCH.add_parsers(parser)


PARTS = (Part(LAB),)

_DESCRIPTION = """An emulated cluster on this machine: nodes are network namespaces, their compute
NICs share a switch; every link is shaped to its rate, with a lane for inference and one for KV, and
storage reads are throttled per node. `run` and `bench` create their own lab and remove it."""
_EPILOG = """\
dualpath lab up --nodes 1P2D --cnic-bytes-per-s 1Gbit --snic-bytes-per-s 50MB
dualpath lab down
dualpath lab run --nodes 1P2D --mode basic,dualpath,oracle
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parsers of `dualpath lab`."""
    parser = subparsers.add_parser(
        "lab",
        help="emulate a cluster on this machine: nodes with shaped compute and storage NICs",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=LazyParser
    )
    up = actions.add_parser(
        "up", help="create a lab", description="Create a lab and print its nodes and links."
    )
    status = actions.add_parser(
        "status",
        help="print nodes and links of a lab",
        description="Print nodes and links of a lab.",
    )
    down = actions.add_parser(
        "down",
        help="remove a lab",
        description="Remove everything of a lab, including leftovers of a crash, and kill the "
        "processes on its nodes.",
    )
    up.add_argument("--dry-run", action="store_true", help="print the steps and exit")
    for action in (up, status):
        add_json_argument(action)
    add_parts(up, PARTS)
    for action in (status, down):
        add_settings(action, LabSettings, only=("name",))
    add_run_parser(actions)
    add_bench_parser(actions)


def run(args: argparse.Namespace) -> int:
    """Run the action; return 0.

    Raises:
        ConfigError: invalid settings, a lab of that name that exists already or does not exist,
            or a step that the kernel refuses.
    """
    if args.action == "bench":
        return BENCH.run(args)
    if args.action == "run":
        return _RUN_GROUP.run_experiment(args, _RUN_ENTRY.load())

    from dualpath_lab.nodes.cluster import lab_down, lab_status

    if args.action == "up":
        return _up(configuration(args, PARTS).settings(LAB, LabSettings), args)
    name = flag_settings(args, LabSettings).name
    if args.action == "status":
        _print(lab_status(name), args)
        return 0
    removed = lab_down(name)
    print_progress(f"lab {name!r} removed: {removed or 'nothing to remove'}")
    return 0


def _up(settings: LabSettings, args: argparse.Namespace) -> int:
    from dualpath_lab.nodes.cluster import lab_steps, lab_up
    from dualpath_lab.nodes.runner import describe

    if args.dry_run:
        for step in lab_steps(settings)[1]:
            print(describe(step))
        return 0
    # SIGTERM raises an exception, which removes the partly created lab.
    with sigterm_as_interrupt():
        state = lab_up(settings)
    _print(state, args)
    return 0


def _print(state: "LabState", args: argparse.Namespace) -> None:
    from dualpath_lab.nodes.cluster import lab_nodes, link_reports, storage_url

    settings, machine = state.settings, state.machine
    found = {
        "settings": settings,
        "shaping": machine.shaping,
        "storage": storage_url(state),
        "nodes": lab_nodes(state),
        "links": link_reports(state),
    }
    if wrote_json(args, found):
        return
    from dualpath.report.text import print_blocks

    head = (
        f"lab {settings.name}: {settings.nodes}, shaping {machine.shaping.value}",
        f"storage {storage_url(state)}",
    )
    nodes = tuple((node.name, node.address) for node in lab_nodes(state))
    links = tuple(
        (link.link, _rate(link.bytes_per_s), "yes" if link.shaped else "NO", link.how)
        for link in link_reports(state)
    )
    print_blocks(
        Notes(head),
        Table("", ("node", "address"), nodes),
        Table("", ("link", "rate per node", "shaped", "how"), links),
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s = {bytes_per_s * 8 / 1e9:g} Gbit/s"
