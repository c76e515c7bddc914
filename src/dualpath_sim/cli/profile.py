"""``dualpath profile MODEL``: measure a model's costs on this machine for the simulator."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dualpath.cli.main import OutputPath
from dualpath.cli.output import print_progress
from dualpath.cli.settings import add_settings, flag_settings
from dualpath.launch.commands import engine_environment
from dualpath.report.files import write_file
from dualpath.vllm.profile_settings import ProfileSettings

if TYPE_CHECKING:
    from dualpath.node.machine import ClientMachine
    from dualpath.vllm.profile_settings import Measurement
    from dualpath_sim.catalog.costs import Profile

#: A worse fit is reported as a warning: the machine was busy, or the cost model does not fit.
_DOUBTFUL_ERROR = 0.15
_DESCRIPTION = """Start one vLLM engine on this machine, time prefill passes with several new and
cached lengths and decode steps of several batches, fit the simulator's coefficients to the medians
and write them as a TOML file for `dualpath simulate --model`. Needs vLLM and an otherwise idle
machine."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath profile`."""
    parser = subparsers.add_parser(
        "profile",
        help="measure a model's costs on this machine for the simulator",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=OutputPath, required=True, metavar="COSTS.toml", help="file to write"
    )
    parser.add_argument("--name", help="name of the model in the file (default: the folder's)")
    add_settings(parser, ProfileSettings, positional=("model",))


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write the file and print a summary; return 0.

    Raises ``ConfigError`` for a grid, model or file that cannot be used.
    """
    from dualpath.node.machine import this_machine
    from dualpath_sim.catalog.costs import fit_profile

    settings = flag_settings(args, ProfileSettings, positional=("model",))
    out, typical = Path(args.out), settings.typical_round
    measurement = _measure(settings)
    profile = fit_profile(measurement, args.name or measurement.facts.model, typical)
    write_file(out, render(profile, measurement, this_machine(), typical).encode())
    _print_summary(profile, measurement, out)
    return 0


def _measure(settings: ProfileSettings) -> "Measurement":
    # The same environment as engines of `dualpath serve`; vLLM and torch read it at import.  The
    # engine is stepped in this process.
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    for name, value in {**engine_environment(), **own}.items():
        os.environ.setdefault(name, value)
    print_progress(f"starting vLLM with {settings.model}")
    from dualpath.vllm.profiler import measure

    return measure(settings, lambda done, total, what: print_progress(f"{done}/{total} {what}"))


def render(
    profile: "Profile",
    measurement: "Measurement",
    machine: "ClientMachine",
    typical: tuple[int, int],
) -> str:
    """Return the TOML file: costs as keys, everything else as comments."""
    import json

    facts, costs = measurement.facts, profile.costs
    quota = profile.quota_flops_per_s
    head = [
        "Costs of one engine, measured by `dualpath profile`. Seconds; see docs/simulator.md.",
        f"Machine: {machine.cpu_count} CPUs ({machine.cpu_model}), "
        f"{machine.memory_bytes / 2**30:.0f} GiB, {machine.platform}; device {facts.device}.",
        f"Engine: {facts.software}.",
        "feed_forward_token_s is the whole time per token: timing whole passes cannot separate "
        "attention's share. pair_s is attention only.",
        f"prefill_tokens_per_s: one round of {typical[0]} cached and {typical[1]} new tokens per "
        "pass, hits included; computed_weight of them pass for each that is new.",
        f"Engine setting quota_flops_per_s = {quota:.4g} (attention FLOP/s of the compute quota)."
        if quota
        else "No quota_flops_per_s: passes did not grow with the pairs measured.",
        f"Largest relative error of the fit: prefill {_worst(profile.prefill_errors):.1%}, "
        f"decode {_worst(profile.decode_errors):.1%}.",
    ]
    lines = [*(f"# {line}" for line in head), "#", "# cached, new tokens: seconds, fit"]
    for p, error in zip(measurement.passes, profile.prefill_errors, strict=True):
        lines.append(f"#   {p.cached}, {p.bsz}: {p.seconds:.6g}, {error:+.1%}")
    lines.append("# requests, mean context: seconds of a decode step, fit")
    for s, error in zip(measurement.steps, profile.decode_errors, strict=True):
        lines.append(f"#   {s.requests}, {s.context_tokens:g}: {s.seconds:.6g}, {error:+.1%}")
    lines += [
        "",
        f"name = {json.dumps(costs.name)}",
        f"layers = {costs.layers}",
        f"kv_bytes_per_token = {costs.kv_bytes_per_token!r}",
        f"prefill_tokens_per_s = {costs.prefill_tokens_per_s:.6g}",
        f"computed_weight = {costs.computed_weight:.6g}",
        f"context_limit_tokens = {costs.context_limit_tokens}",
        "",
        "[prefill]",
        f"batch_s = {costs.prefill.batch_s!r}",
        f"feed_forward_token_s = {costs.prefill.feed_forward_token_s!r}",
        f"pair_s = {costs.prefill.pair_s!r}",
        "",
        "[decode]",
        f"step_s = {costs.decode.step_s!r}",
        f"request_s = {costs.decode.request_s!r}",
        f"pair_s = {costs.decode.pair_s!r}",
    ]
    return "\n".join(lines) + "\n"


def _print_summary(profile: "Profile", measurement: "Measurement", out: Path) -> None:
    costs, quota = profile.costs, profile.quota_flops_per_s
    print(f"{costs.name} on {measurement.facts.device}, {measurement.facts.software}")
    print(f"prefill: {costs.prefill_tokens_per_s:.0f} tokens/s of the typical round, hits included")
    print(f"  fit within {_worst(profile.prefill_errors):.1%} of {len(measurement.passes)} passes")
    print(f"decode: fit within {_worst(profile.decode_errors):.1%} of {len(measurement.steps)}")
    if quota:
        print(f"engine setting quota_flops_per_s: {quota:.4g}")
    worst = max(_worst(profile.prefill_errors), _worst(profile.decode_errors))
    if worst > _DOUBTFUL_ERROR:
        print(
            f"warning: a measured time differs {worst:.0%} from the fit; repeat on an idle "
            "machine, with a larger --repeat and --decode-steps",
            file=sys.stderr,
        )
    print(f"written to {out}; use it with `dualpath simulate --model {out}`")


def _worst(errors: tuple[float, ...]) -> float:
    return max(abs(error) for error in errors)
