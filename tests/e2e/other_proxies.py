"""Proxies of others, as commands: where they are installed, and how their engines are named.

They are no dependency of ours.  Tests find them in the folder that the environment variable
``OTHER_PROXIES`` names; docs/how-to/other-proxies.md has the commands that fill it.
"""

import http.client
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from tests.e2e.plain_engine import until
from tests.guard import GUARD_S

from dualpath.launch.ports import claim_port
from dualpath.launch.process import SpawnedProcess, Supervisor

VARIABLE = "OTHER_PROXIES"

#: Of a proxy's port, and the base URLs of prefill and decode engines, to its arguments.
Arguments = Callable[[int, Sequence[str], Sequence[str]], Sequence[str]]


class OtherProxy(NamedTuple):
    """A proxy of others.

    ``program`` is a path in the folder: a command, a Python file, or the Python that runs
    ``script``, a file beside this one.  ``token_ids`` is whether it takes such prompts.  A proxy
    without a program is a ``script`` that runs here.  ``workers`` is whether engines are made known
    to it by its HTTP API, as SMG's are.
    """

    name: str
    program: str
    arguments: Arguments
    token_ids: bool = True
    script: str = ""
    workers: bool = False


def _ports(urls: Sequence[str]) -> list[str]:
    return [str(urlsplit(url).port) for url in urls]


def _hosts_and_ports(port: int, prefill: Sequence[str], decode: Sequence[str]) -> list[str]:
    """Return the arguments of vLLM's ``toy_proxy_server.py`` and ``disagg_proxy_multiturn.py``."""
    return [
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prefiller-hosts", *["127.0.0.1"] * len(prefill)),
        *("--prefiller-ports", *_ports(prefill)),
        *("--decoder-hosts", *["127.0.0.1"] * len(decode)),
        *("--decoder-ports", *_ports(decode)),
    ]


def _pushing(port: int, prefill: Sequence[str], decode: Sequence[str]) -> list[str]:
    """Return the arguments of vLLM's ``disagg_proxy_pushconnector_demo.py``."""
    return [
        *("--model", "tiny", "--port", str(port)),
        *("--prefill", *(urlsplit(url).netloc for url in prefill)),
        *("--decode", *(urlsplit(url).netloc for url in decode)),
        *("--prefill-engine-id", "unused", "--prefill-kv-host", "127.0.0.1"),
    ]


def _bootstrap(port: int, prefill: Sequence[str], decode: Sequence[str]) -> list[str]:
    """Return the arguments of vLLM's ``mooncake_connector_proxy.py``.

    The bootstrap port of a prefill engine is that of its HTTP server.
    """
    return [
        *("--host", "127.0.0.1", "--port", str(port)),
        *(part for url in prefill for part in ("--prefill", url, *_ports([url]))),
        *(part for url in decode for part in ("--decode", url)),
    ]


def _vllm_router(connector: str) -> Arguments:
    def arguments(port: int, prefill: Sequence[str], decode: Sequence[str]) -> list[str]:
        return [
            *("--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"),
            *("--vllm-pd-disaggregation", "--kv-connector", connector),
            *("--prometheus-port", str(claim_port())),
            *_bootstrap(port, prefill, decode)[4:],
        ]

    return arguments


def _production_stack(port: int, prefill: Sequence[str], decode: Sequence[str]) -> list[str]:
    engines = [*prefill, *decode]
    labels = ["prefill"] * len(prefill) + ["decode"] * len(decode)
    return [
        *("--host", "127.0.0.1", "--port", str(port), "--service-discovery", "static"),
        *("--static-backends", ",".join(engines)),
        *("--static-models", ",".join(["tiny"] * len(engines))),
        *("--static-model-labels", ",".join(labels)),
        *("--routing-logic", "disaggregated_prefill_orchestrated"),
        *("--prefill-model-labels", "prefill", "--decode-model-labels", "decode"),
    ]


def _sglang_router(port: int, prefill: Sequence[str], decode: Sequence[str]) -> list[str]:
    return [
        *("launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"),
        *("--pd-disaggregation", "--prometheus-port", str(claim_port())),
        *(part for url in prefill for part in ("--prefill", url)),
        *(part for url in decode for part in ("--decode", url)),
    ]


def _smg(port: int, prefill: Sequence[str], decode: Sequence[str]) -> list[str]:
    return [
        *("launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"),
        *("--pd-disaggregation", "--backend", "vllm", "--prometheus-port", str(claim_port())),
    ]


def _of_scripts(port: int, prefill: Sequence[str], decode: Sequence[str]) -> list[str]:
    return ["--port", str(port), "--prefill", *prefill, "--decode", *decode]


_EXAMPLES = "vllm/examples/disaggregated"
PROXIES = (
    OtherProxy(
        "vllm-example",
        "vllm/tests/v1/kv_connector/nixl_integration/toy_proxy_server.py",
        _hosts_and_ports,
    ),
    OtherProxy(
        "vllm-multiturn",
        f"{_EXAMPLES}/disaggregated_serving/disagg_proxy_multiturn.py",
        _hosts_and_ports,
    ),
    OtherProxy(
        "vllm-push",
        f"{_EXAMPLES}/disaggregated_serving/disagg_proxy_pushconnector_demo.py",
        _pushing,
    ),
    OtherProxy(
        "vllm-mooncake",
        f"{_EXAMPLES}/mooncake_connector/mooncake_connector_proxy.py",
        _bootstrap,
    ),
    OtherProxy("vllm-router", "vllm-router/bin/vllm-router", _vllm_router("nixl")),
    OtherProxy("vllm-router-mooncake", "vllm-router/bin/vllm-router", _vllm_router("mooncake")),
    OtherProxy("production-stack", "production-stack/bin/vllm-router", _production_stack),
    OtherProxy("sglang-router", "sglang-router/bin/sglang-router", _sglang_router, token_ids=False),
    OtherProxy("smg", "smg/bin/smg", _smg, token_ids=False, workers=True),
    OtherProxy("ray-serve", "ray/bin/python", _of_scripts, script="ray_serve_proxy.py"),
    OtherProxy("llm-d-sidecar", "", _of_scripts, script="llm_d_sidecar.py"),
)


def command(proxy: OtherProxy) -> tuple[str, ...]:
    """Return the proxy's command without arguments; skips the test if it is not installed."""
    script = [str(Path(__file__).with_name(proxy.script))] if proxy.script else []
    if not proxy.program:
        return (sys.executable, *script)
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} is not set to a folder with proxies of others")
    program = Path(folder) / proxy.program
    if not program.exists():
        pytest.skip(f"{program} is not there: {proxy.name} is not installed")
    if program.suffix == ".py":
        return (sys.executable, str(program))
    return (str(program), *script)


@contextmanager
def running(
    proxy: OtherProxy, prefill: Sequence[str], decode: Sequence[str], log: Path
) -> Iterator[str]:
    """Run a proxy before these engines; yields its URL when it can send a request to both."""
    start, port = command(proxy), claim_port()
    # Its own environment, and no proxy of the network.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with Supervisor() as started:
        process = SpawnedProcess(
            proxy.name, (*start, *proxy.arguments(port, prefill, decode)), log, environment
        )
        started.add(process)
        url = f"http://127.0.0.1:{port}"
        known = {"prefill": prefill, "decode": decode} if proxy.workers else {}
        for role, engine in ((role, engine) for role, urls in known.items() for engine in urls):
            # As NIXL's connector: then its legs are those of the two-leg protocol.
            worker = {
                "url": engine, "worker_type": role, "runtime": "vllm", "connection_mode": "http",
                "kv_connector": "NixlConnector", "kv_role": "kv_both",
            }  # fmt: skip
            until(partial(_posted, url, "/workers", worker, process), f"{engine} is a worker")
        first = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        served = partial(_posted, url, "/v1/completions", first, process)
        until(served, f"{proxy.name} serves", GUARD_S)
        yield url


def _posted(url: str, path: str, body: Mapping[str, object], process: SpawnedProcess) -> bool:
    """Return whether the proxy has answered with success."""
    assert process.alive, process.log_tail()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=GUARD_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        answer.read()  # Some send their status before leg 2, and no leg 2 to a client that left.
        return answer.status in (200, 202)
    except OSError:
        return False
    finally:
        connection.close()
