"""Limits and keys at the routers' HTTP servers: each with a clear status, all else served."""

import asyncio
import errno
import logging
import os
import socket
from pathlib import Path
from resource import RLIM_INFINITY
from typing import Any

import msgspec
import pytest
from tests.emulated_cluster import cluster
from tests.guard import GUARD_S
from tests.listeners import open_listeners
from tests.unit.router_cluster import cluster as router_cluster
from tests.unit.router_fakes import job
from tests.unit.scraped_cluster import Scrape

from dualpath.core import control
from dualpath.core.errors import BadRequestError, OverloadedError, PromptTooLongError
from dualpath.core.modes import Mode
from dualpath.core.transfers import DecodeTransfer, to_transfer_params
from dualpath.router.api_keys import ApiKeys, engine_headers, warn_if_open
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.requests.limits import (
    WANTED_OPEN_FILES,
    NoFilesFilter,
    RequestLimits,
    raised_limit,
    refusal,
)
from dualpath.router.requests.request import check_prompt
from dualpath.router.scheduler.exchange import AttemptChannel, Exchange
from dualpath.router.scheduler.registry import Registry
from dualpath.router.settings import RouterSettings

PROMPT = list(range(1, 20))


# ---------------------------------------------------------------------- the light router


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"prompt": list(range(1, 42))}, 400, ("41 tokens", "max_prompt_tokens allows 40")),
        ({"prompt": [1] * 3000}, 413, ("more than 4096 bytes", "--max-body-bytes")),
        ({"prompt": [1, 32000]}, 400, ("token id 32000", "0 to 31999")),
        ({"prompt": [-1]}, 400, ("token id -1", "vocabulary")),
        ({"n": 2}, 400, ("n is 2", "set n to 1")),
        ({"cache_salt": ""}, 400, ("cache_salt has 0 characters", "1 to 128")),
        ({"max_tokens": 10**9}, 400, ("context holds",)),
    ],
)
async def test_requests_beyond_a_limit_are_refused_with_the_limit(changes, status, words, tmp_path):
    settings = RouterSettings(mode=Mode.DUALPATH, max_prompt_tokens=40, max_body_bytes=4096)
    async with cluster(tmp_path, Mode.DUALPATH, router=settings) as made:
        body = {"prompt": PROMPT, "tokens": 2, **changes}
        got, answer = await made.post(**body)
        assert got == status
        assert all(word in answer["error"]["message"] for word in words), answer
        assert (await made.post(PROMPT, 2))[0] == 200


def test_a_prompt_too_long_for_the_draft_model_is_refused() -> None:
    class Engines:
        def limit(self, name: str) -> int | None:
            return {"max_model_len": 12, "max_prompt_tokens": 9}.get(name)

    engines: Any = Engines()
    check_prompt(9, RouterSettings(), engines)
    with pytest.raises(PromptTooLongError, match="10 tokens, the draft model's context allows 9"):
        check_prompt(10, RouterSettings(), engines)


async def test_a_full_router_says_when_to_retry(tmp_path: Path) -> None:
    settings = RouterSettings(mode=Mode.DUALPATH, max_concurrent_requests=1, max_waiting_requests=0)
    async with cluster(tmp_path, Mode.DUALPATH, router=settings, speedup=0.01) as made:
        url = f"{made.endpoint}/v1/completions"
        slow = {"prompt": PROMPT, "max_tokens": 300, "stream": True}
        async with made.http.post(url, json=slow) as running:
            assert running.status == 200
            async with made.http.post(url, json={"prompt": PROMPT}) as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
                message = msgspec.json.decode(await refused.read())["error"]["message"]
                assert "at most 1 run and 0 wait" in message
            running.close()
        await made.idle()
        async with asyncio.timeout(GUARD_S):
            await asyncio.gather(*made.service._tasks, return_exceptions=True)
        assert made.service.turned_away() is None
        assert (await made.post(PROMPT, 1))[0] == 200


async def test_a_request_that_gives_way_in_a_full_queue_is_429_with_retry_after(
    tmp_path: Path,
) -> None:
    settings = RouterSettings(mode=Mode.DUALPATH, max_concurrent_requests=1, max_waiting_requests=3)
    async with cluster(tmp_path, Mode.DUALPATH, router=settings, speedup=0.01) as made:
        url = f"{made.endpoint}/v1/completions"

        async def ask(salt: str, **fields: object) -> tuple[int, str | None]:
            body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": salt, **fields}
            async with made.http.post(url, json=body) as answer:
                await answer.read()
                return answer.status, answer.headers.get("Retry-After")

        async def waits(count: int) -> None:
            async with asyncio.timeout(GUARD_S):
                while made.service.admission.report()["waiting"] < count:
                    await asyncio.sleep(0)

        assert (await ask("many", priority=1 << 64))[0] == 400
        slow = {"prompt": PROMPT, "max_tokens": 300, "stream": True}
        async with made.http.post(url, json=slow) as running:
            early = asyncio.create_task(ask("many"))
            await waits(1)
            late = asyncio.create_task(ask("many", priority=1))
            await waits(2)
            few = asyncio.create_task(ask("few"))
            await waits(3)
            assert await ask("many", priority=2) == (429, "1")
            third = asyncio.create_task(ask("third"))
            assert await late == (429, "1")
            running.close()
        async with asyncio.timeout(GUARD_S):
            assert list(await asyncio.gather(early, few, third)) == [(200, None)] * 3


async def test_every_path_asks_for_a_key_but_those_on_the_list(tmp_path: Path, monkeypatch) -> None:
    """Clients show one of the router's keys, the router shows the engines theirs."""
    monkeypatch.setenv("VLLM_API_KEY", "of-the-engines")
    monkeypatch.setenv("DUALPATH_ENGINE_API_KEY", "of-the-engines")
    settings = RouterSettings(mode=Mode.DUALPATH, api_keys=("first", "second"))
    async with cluster(tmp_path, Mode.DUALPATH, router=settings) as made:

        async def status(url: str, key: str | None, method: str = "POST") -> int:
            headers = {"Authorization": key} if key else {}
            body = {"prompt": PROMPT, "max_tokens": 1}
            async with made.http.request(method, url, json=body, headers=headers) as response:
                await response.read()
                return response.status

        completions = f"{made.endpoint}/v1/completions"
        for key in ("Bearer first", "Bearer second", "bearer second"):
            assert await status(completions, key) == 200
        for wrong in (None, "Bearer third", "Bearer of-the-engines", "Basic first", "first"):
            assert await status(completions, wrong) == 401
        for path in ("/health", "/dashboard"):
            assert await status(made.endpoint + path, None, "GET") == 200
        for path in (
            *("/metrics", "/dualpath/v1/status", "/dualpath/v1/dashboard", "/v1/models"),
            *("/", "/no-such-path", "/health/", "//health", "/dashboard/../metrics"),
        ):
            assert await status(made.endpoint + path, None, "GET") == 401
            assert await status(made.endpoint + path, "Bearer first", "GET") in (200, 404)
        engine = made.engines["decode-0"].api_url + "/inference/v1/generate"
        assert await status(engine, "Bearer first") == 401
        assert await status(engine, "Bearer of-the-engines") == 400  # no transfer
        # A scraper of an engine must not hold the key that allows forging transfers.
        url = made.engines["decode-0"].api_url
        assert await status(f"{url}/metrics", None, "GET") == 200
        assert await status(f"{url}/no-such-path", None, "GET") == 401


async def test_metrics_are_open_by_choice(tmp_path: Path) -> None:
    settings = RouterSettings(mode=Mode.DUALPATH, api_keys=("first",), open_metrics=True)
    async with cluster(tmp_path, Mode.DUALPATH, router=settings) as made:
        for path, status in (("/metrics", 200), ("/dualpath/v1/status", 401)):
            async with made.http.get(made.endpoint + path) as response:
                assert response.status == status


@pytest.mark.parametrize(
    ("method", "path", "shown", "admitted"),
    [
        ("POST", "/v1/completions", "Bearer k", True),
        ("POST", "/v1/completions", None, False),
        ("POST", "/inference/v1/generate", None, False),
        ("POST", "/tokenize", None, False),
        ("POST", "/invocations", None, False),
        ("GET", "/metrics", None, False),
        ("GET", "/health", None, True),
        ("GET", "/health/", None, False),
        ("GET", "", None, False),
        ("OPTIONS", "/v1/completions", None, True),
        ("POST", "/v1/completions", "Bearer \udcff", False),
        ("POST", "/v1/completions", "Bearer", False),
    ],
)
def test_one_rule_for_both_routers(method, path, shown, admitted):
    assert ApiKeys(["k"]).admit(method, path, shown) is admitted
    assert ApiKeys([], {}).admit(method, path, shown)
    assert ApiKeys([], {"VLLM_API_KEY": "k"}).admit(method, path, shown) is admitted


def test_an_endpoint_without_a_key_logs_a_warning(caplog):
    for host, keys in (("127.0.0.1", []), ("0.0.0.0", ["k"])):
        warn_if_open(host, ApiKeys(keys, {}))
    assert not caplog.records
    warn_if_open("0.0.0.0", ApiKeys([], {}))
    assert "serves everybody who reaches it; --api-key" in caplog.text


def test_engines_see_their_key_only_if_there_is_one():
    assert engine_headers({}) == {}
    assert engine_headers({"DUALPATH_ENGINE_API_KEY": "k"}) == {"Authorization": "Bearer k"}


async def test_nothing_listens_beyond_this_machine_unless_asked(tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH):
        assert not open_listeners({os.getpid()})
    with socket.create_server(("0.0.0.0", 0)) as opened:
        assert open_listeners({os.getpid()}) == [f"0.0.0.0:{opened.getsockname()[1]}"]


async def test_a_client_cannot_choose_the_location_of_kv(tmp_path: Path) -> None:
    """Transfers of its own are dropped, so it cannot point at another's slots."""
    async with cluster(tmp_path, Mode.DUALPATH) as made:
        expected = await made.ask(PROMPT, 3, cache_salt="one")
        forged = to_transfer_params(DecodeTransfer("victim", 19, (0, 1, 2, 3, 4)))
        assert await made.ask(PROMPT, 3, cache_salt="two", kv_transfer_params=forged) == expected
        await made.idle()
        assert made.counts(1) == 0


# ---------------------------------------------------------------------- the service


@pytest.mark.virtual_time
async def test_more_requests_than_may_wait_are_refused_not_queued():
    settings = RouterSettings(max_concurrent_requests=1, max_waiting_requests=1)
    async with router_cluster(settings=settings) as made:
        made.calls.gates["prefill"] = gate = asyncio.Event()
        under_way = [asyncio.create_task(made.run(job(name, range(9)))) for name in ("a", "b")]
        await made.arrives("prefill")
        with pytest.raises(OverloadedError, match="2 requests are under way, at most 1 run"):
            await made.run(job("c", range(9)))
        gate.set()
        assert len(await asyncio.gather(*under_way)) == 2
        assert len(await made.run(job("c", range(9)))) == 6


async def test_two_attempts_of_one_name_never_receive_each_others_messages():
    """A client may call its request "a.2", which is what a's second attempt is called."""

    class Ack(AttemptChannel):
        def kv_in_hbm(self, arrived: control.KvInHbm) -> None:
            channels.append(self)

    exchange = Exchange()
    channels: list[AttemptChannel] = []
    exchange.open(first := Ack("a.2"))
    with pytest.raises(BadRequestError, match="in use"):
        exchange.open(Ack("a.2"))
    exchange.deliver("d0", control.KvInHbm(request_id="a.2", h2d_s=0.0))
    assert channels == [first]


# ---------------------------------------------------------------------- limits as ASGI


class Asked:
    """One call of an application behind the limits; ``pieces`` arrive as a chunked body."""

    def __init__(
        self,
        service: Any,
        *pieces: bytes,
        method: str = "POST",
        declared: int = -1,
        path: str = "/v1/completions",
    ):
        self.sent: list[dict[str, Any]] = []
        self.read = 0
        self._pieces = list(pieces)
        state = type("State", (), {"dualpath_service": service})
        headers = [(b"content-length", b"%d" % declared)] if declared >= 0 else []
        app = type("App", (), {"state": state})
        self._scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": headers,
        }
        self._scope["app"] = app

    async def by(self, app: Any) -> int:
        await RequestLimits(app)(self._scope, self._receive, self._send)
        return int(self.sent[0]["status"])

    async def _receive(self) -> dict[str, Any]:
        piece = self._pieces.pop(0)
        self.read += len(piece)
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


class Service:
    settings = RouterSettings(max_body_bytes=10)

    def __init__(self, full: str | None = None) -> None:
        self._full = full
        self.metrics = RouterMetrics(Registry(), dict)

    def turned_away(self) -> OverloadedError | None:
        return OverloadedError(self._full) if self._full else None

    def retry_after_s(self) -> int:
        return 7

    def refused(self) -> dict[str, float]:
        """Counted refusals by reason."""
        found = Scrape(self.metrics.exposition().decode()).samples
        counts = [s for s in found if s.name == "dualpath:http_refusals_total" and s.value]
        return {sample.labels["reason"]: sample.value for sample in counts}


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Reads the whole body; as web frameworks do, answers 400 to whatever goes wrong meanwhile."""
    status = 200
    try:
        while (await receive())["more_body"]:
            pass
    except Exception:
        status = 400
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"done"})


async def test_a_body_of_no_declared_length_ends_at_the_limit():
    asked = Asked(service := Service(), b"12345", b"67890", b"1", b"2" * 1000)
    assert await asked.by(echo) == 413
    assert service.refused() == {"body-size": 1}
    assert asked.read == 11
    assert len(asked.sent) == 2
    assert b"more than 10 bytes" in asked.sent[1]["body"]
    assert await Asked(Service(), b"12345", b"67890").by(echo) == 200


async def test_a_body_of_too_large_a_declared_length_is_not_read():
    asked = Asked(service := Service(), b"x" * 11, declared=11)
    assert await asked.by(echo) == 413
    assert service.refused() == {"body-size": 1}
    assert asked.read == 0


async def test_a_full_service_still_answers_reads_of_its_status():
    asked = Asked(service := Service("full"), b"")
    assert await asked.by(echo) == 429
    assert service.refused() == {"overloaded": 1}
    assert (b"retry-after", b"7") in asked.sent[0]["headers"]
    assert await Asked(Service("full"), b"", method="GET").by(echo) == 200
    pausing = Asked(Service("full"), b"", path="/dualpath/v1/engines/pe-0/pause")
    assert await pausing.by(echo) == 200  # the operator's requests are no load


async def test_what_the_application_refuses_is_counted_once_however_long_its_answer():
    async def refusing(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 400, "headers": []})
        for piece in (b'{"error": {"param": "input_tokens"}}', b" ", b""):
            await send({"type": "http.response.body", "body": piece, "more_body": bool(piece)})

    service = Service()
    assert await Asked(service, b"").by(refusing) == 400
    assert await Asked(service, b"").by(echo) == 200
    assert service.refused() == {"prompt-length": 1}


async def test_a_defect_of_the_application_stays_visible():
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("defect")

    with pytest.raises(RuntimeError, match="defect"):
        await Asked(Service(), b"").by(broken)


# ---------------------------------------------------------------------- open files


async def test_running_out_of_files_is_logged_once_and_without_a_traceback(caplog):
    loop = asyncio.get_running_loop()
    logger = logging.getLogger("asyncio")
    logger.addFilter(only_once := NoFilesFilter())
    try:
        for _ in range(5):
            message = "socket.accept() out of system resource"
            error = OSError(errno.EMFILE, "Too many open files")
            loop.default_exception_handler({"message": message, "exception": error})
        loop.default_exception_handler({"message": "another", "exception": ValueError("defect")})
    finally:
        logger.removeFilter(only_once)
    once, other = caplog.records
    assert "ulimit -n" in once.getMessage()
    assert (once.levelname, once.exc_info) == ("WARNING", None)
    assert other.exc_info


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 1 << 20, WANTED_OPEN_FILES),
        (1024, RLIM_INFINITY, WANTED_OPEN_FILES),
        (1024, 20000, 20000),  # vLLM's own server stays at 1024 here
        (100_000, 1 << 20, 100_000),
        (RLIM_INFINITY, RLIM_INFINITY, RLIM_INFINITY),
    ],
)
def test_the_limit_rises_as_far_as_it_may_and_never_falls(
    soft: int, hard: int, raised: int
) -> None:
    assert raised_limit(soft, hard) == raised


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (429, "rate_limit_exceeded"),
        (503, "ServiceUnavailableError"),
    ],
)
def test_the_error_type_shows_clients_what_may_be_retried(status: int, kind: str):
    start, body = refusal(status, "why")
    assert (start["status"], msgspec.json.decode(body["body"])["error"]["type"]) == (status, kind)
