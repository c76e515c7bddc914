"""Run real clients, unchanged, against a small cluster: `make clients`.

Installs every client in its own environment, starts 1P1D with a tiny random model (or, with
`--emulated NODES`, emulated engines), runs the clients one after the other and prints for each the
requests that the router counted.  The exit code is 1 if
one failed; clients that cannot run on this machine are listed with the reason.  This is an
acceptance test and no experiment of the harness: it has no numbers to compare a rerun with.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from clients import CLIENTS, Client, NotRunnable, Target, environment

from dualpath.launch.process import SpawnedProcess

MODEL = "tiny"

#: Context length of the engines: system prompts are long in a vocabulary of 512 tokens.
MAX_MODEL_LEN = 16384

_START_S = 300
_CLIENT_S = 300


@contextmanager
def cluster(folder: Path) -> Iterator[Target]:
    """Serve the tiny model with a tool parser during the ``with`` block."""
    dualpath = [sys.executable, "-m", "dualpath.cli.main"]
    made = subprocess.run([*dualpath, "model", "tiny-qwen2"], check=True, capture_output=True)
    model = made.stdout.decode().split()[-1]
    command = [
        *dualpath, "serve", model, "--served-model-names", MODEL, "--port", "0",
        "--storage", str(folder / "storage"), "--log-dir", str(folder / "logs"),
        "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--hbm-bytes", "256MiB",
        "--vllm-args", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    ]  # fmt: skip
    print(shlex.join(["dualpath", *command[3:]]), flush=True)
    serve = SpawnedProcess("serve", command, folder / "serve.log")
    try:
        url = re.findall(r"http://[\d.]+:\d+", serve.wait_for_line("endpoint", _START_S))[0]
        yield Target(url, MODEL, Path(model), folder)
    finally:
        serve.send_signal(signal.SIGINT)
        serve.end(60)


@contextmanager
def emulated_cluster(folder: Path, nodes: str) -> Iterator[Target]:
    """Serve numbers as text during the ``with`` block; clients count with SmolLM2's tokenizer."""
    dualpath = [sys.executable, "-m", "dualpath.cli.main"]
    made = subprocess.run([*dualpath, "model", "smollm2"], check=True, capture_output=True)
    command = [
        *dualpath, "emulate", "cluster", "--nodes", nodes, "--model", "qwen2.5-32b",
        "--storage", str(folder / "storage"), "--transport", "memory", "--layers", "4",
        "--kv-bytes-per-token", "64", "--hbm-bytes", "256MiB", "--buffer-bytes", "64MiB",
    ]  # fmt: skip
    print(shlex.join(["dualpath", *command[3:]]), flush=True)
    serve = SpawnedProcess("emulate", command, folder / "serve.log")
    try:
        url = re.findall(r"http://[\d.]+:\d+", serve.wait_for_line("endpoint", _START_S))[0]
        yield Target(url, MODEL, Path(made.stdout.decode().split()[-1]), folder)
    finally:
        serve.send_signal(signal.SIGINT)
        serve.end(60)


def counters(url: str) -> dict[str, float]:
    """Return the totals of the router's status."""
    with urllib.request.urlopen(f"{url}/dualpath/v1/status", timeout=30) as response:
        totals: dict[str, float] = json.load(response)["counters"]
    return totals


def run(client: Client, target: Target, environments: Path) -> str:
    """Run one client; return its result and the tokens that the router counted.

    Raises ``NotRunnable``, ``CalledProcessError``, ``TimeoutExpired`` or, if the client's results
    contain failed requests, ``AssertionError``.
    """
    programs = environment(client.package, environments)
    work = target.folder / client.name
    work.mkdir()
    command = client.command(target, work)
    print(f"\n{client.name} {client.package.version}\n$ {shlex.join(command)}", flush=True)
    before = counters(target.url)
    variables = {**os.environ, **client.variables, **_found(client, programs.parent)}
    with (work / "output.log").open("w") as output:
        subprocess.run(
            [str(programs / command[0]), *command[1:]],
            env=variables, cwd=work, stdout=output, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, timeout=_CLIENT_S, check=True,
        )  # fmt: skip
    result = client.check(work)
    after = counters(target.url)
    prompt, hit = (int(after[name] - before[name]) for name in ("prompt_tokens", "hit_tokens"))
    assert prompt > 0, "the router saw no request"
    return f"{result}; {prompt} prompt tokens, {hit} of them loaded"


def _found(client: Client, place: Path) -> dict[str, str]:
    installed = next(place.glob("lib/python*/site-packages"))
    return {name: str(installed / path) for name, path in client.paths.items()}


def main(arguments: Sequence[str]) -> int:
    """Run the named clients, or all; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [client.name for client in CLIENTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(names)}")
    parser.add_argument(
        "--emulated", metavar="NODES", help="against so many emulated engines, such as 2P4D"
    )
    parser.add_argument(
        "--environments", type=Path, required=True, help="folder of the clients' environments"
    )
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.names) - set(names)
    if unknown:
        parser.error(f"unknown client {', '.join(unknown)}; known: {', '.join(names)}")
    # SIGTERM also ends the cluster.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    outcomes: dict[str, str] = {}
    failed = False
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        place, nodes = Path(folder), chosen.emulated
        started = emulated_cluster(place, nodes) if nodes else cluster(place)
        target = stack.enter_context(started)
        for client in CLIENTS:
            name = client.name
            if (chosen.names and name not in chosen.names) or (nodes and not client.emulated):
                continue
            try:
                outcomes[name] = f"ok: {run(client, target, chosen.environments.absolute())}"
            except NotRunnable as reason:
                outcomes[name] = f"not run: {reason}"
            except (subprocess.SubprocessError, AssertionError) as error:
                failed = True
                outcomes[name] = f"FAILED: {error}"
                log = target.folder / name / "output.log"
                print(log.read_text()[-4000:] if log.exists() else getattr(error, "stderr", ""))
            print(outcomes[name], flush=True)
    print("\n" + "\n".join(f"{name:16} {outcome}" for name, outcome in outcomes.items()))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
