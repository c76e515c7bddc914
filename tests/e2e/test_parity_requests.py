"""The same requests to a plain vLLM server and to the router: the same answers, field by field."""

import http.client
import json
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.parity_cases import (
    CHANGING,
    CHATS,
    ENGINELESS,
    GREEDY,
    REFUSED,
    SAMPLING,
    STRUCTURED,
    Case,
    chat,
    completion,
    messages,
    responses,
)
from tests.e2e.parity_compare import Reply, ask, differences
from tests.e2e.parity_model import thinking_model
from tests.e2e.plain_engine import PlainEngine, in_parallel, until
from tests.guard import GUARD_S

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode

pytestmark = pytest.mark.engine

#: Arguments of the plain server, the router and the engines.
VLLM_ARGUMENTS = (
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    "--reasoning-parser", "qwen3",
    "--enable-prompt-tokens-details",
    "--max-num-seqs", "8",
)  # fmt: skip


class Servers:
    """A plain server and a router with 1P1D; every case is asked once."""

    def __init__(self, plain: PlainEngine, cluster: EngineCluster) -> None:
        self.cluster = cluster
        self._urls = (plain.url, cluster.url)
        self._replies: dict[str, list[Reply]] = {}

    def ask(self, case: Case) -> list[Reply]:
        """Return the plain server's reply and the router's."""
        key = repr(case)
        if key not in self._replies:
            self._replies[key] = in_parallel(
                [partial(ask, url, case.method, case.path, case.body) for url in self._urls]
            )
        return self._replies[key]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder: Path = tmp_path_factory.mktemp("parity")
    model = thinking_model(folder / "model")
    settings = tiny_cluster_settings(
        model, folder / "storage", mode=Mode.DUALPATH, vllm_args=VLLM_ARGUMENTS
    )
    plain = PlainEngine(model, folder, 64, *VLLM_ARGUMENTS)
    with EngineCluster(settings, folder) as cluster:
        cluster.start_engine(Role.PREFILL, 0)
        cluster.start_engine(Role.DECODE, 0)
        with plain:
            cluster.wait_for("pe-0", "de-0")
            yield Servers(plain, cluster)


def named(case: Case) -> str:
    return case.name


@pytest.mark.parametrize(
    "case", [*ENGINELESS, *SAMPLING, *CHANGING, *STRUCTURED, *CHATS], ids=named
)
def test_an_answer_is_the_plain_servers(case: Case, servers: Servers) -> None:
    plain, routed = servers.ask(case)
    assert plain.status == 200, plain
    assert routed.status == 200, routed
    assert not list(differences(plain.body, routed.body))


@pytest.mark.parametrize("case", CHANGING, ids=named)
def test_an_option_shows_in_the_answer(case: Case, servers: Servers) -> None:
    (choice,) = servers.ask(case)[0].body["choices"]
    assert choice["token_ids"] != servers.ask(GREEDY)[0].body["choices"][0]["token_ids"]


@pytest.mark.parametrize("case", REFUSED, ids=named)
def test_a_refusal_is_the_plain_servers(case: Case, servers: Servers) -> None:
    plain, routed = servers.ask(case)
    assert plain.status >= 400, plain
    assert (routed.status, list(differences(plain.body, routed.body))) == (plain.status, [])


def test_every_route_of_the_plain_server_is_there(servers: Servers) -> None:
    plain, routed = servers.ask(Case("routes", "/openapi.json"))
    for path, methods in plain.body["paths"].items():
        assert methods.keys() <= routed.body["paths"].get(path, {}).keys(), path


def test_stored_prompts_were_loaded_for_them(servers: Servers) -> None:
    """Most cases share a prompt, so that its first block came from storage."""
    status = ask(servers.cluster.url, "GET", "/dualpath/v1/status").body
    assert status["counters"]["hit_tokens"] > status["counters"]["prompt_tokens"] / 4


ENDLESS = {"max_tokens": 3000, "ignore_eos": True, "temperature": 1.0}

#: The Anthropic API has no `ignore_eos`: a grammar forbids the end of the text for as long.
LONG_TEXT = {"format": {"type": "json_schema", "schema": {"type": "string", "minLength": 3000}}}


@pytest.mark.parametrize(
    "case",
    [
        completion("whole", **ENDLESS),
        completion("of two samples", n=2, **ENDLESS),
        completion("sampled by the decode engine alone", seed=3, **ENDLESS),
        chat("streamed", stream=True, **ENDLESS),
        responses("streamed", stream=True, max_output_tokens=3000, ignore_eos=True),
        messages("streamed", stream=True, max_tokens=3000, output_config=LONG_TEXT,
                 stop_sequences=["no such text"]),
    ],
    ids=named,
)  # fmt: skip
def test_a_client_that_leaves_frees_both_engines(case: Case, servers: Servers) -> None:
    cluster = servers.cluster
    cluster.wait_idle()
    before, cancelled = free_hbm_tokens(cluster), cancelled_requests(cluster)
    connection = http.client.HTTPConnection(urlsplit(cluster.url).netloc, timeout=GUARD_S)
    headers = {"Content-Type": "application/json"}
    connection.request(case.method, case.path, json.dumps(case.body), headers)
    until(lambda: free_hbm_tokens(cluster)["de-0"] < before["de-0"], "decoding")
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    cluster.wait_idle()
    until(lambda: free_hbm_tokens(cluster) == before, "HBM of both engines free again")
    samples = case.body.get("n", 1)  # Each is a request of its own at the scheduler.
    until(lambda: cancelled_requests(cluster) == cancelled + samples, "counted as cancelled")


def cancelled_requests(cluster: EngineCluster) -> float:
    """Return how many requests ended because their client had left."""
    with urlopen(f"{cluster.url}/metrics", timeout=GUARD_S) as reply:
        (sample,) = (
            sample
            for family in text_string_to_metric_families(reply.read().decode())
            for sample in family.samples
            if sample.name == "dualpath:requests_total" and sample.labels["outcome"] == "cancelled"
        )
    return float(sample.value)


def free_hbm_tokens(cluster: EngineCluster) -> dict[str, int]:
    """Return the free HBM that each engine last reported."""
    reports = {state.info.engine_id: state.report for state in cluster.service.registry.all()}
    return {
        name: report.load.free_hbm_tokens for name, report in reports.items() if report is not None
    }
