"""A web page of another site reaches every server of a cluster, and changes nothing there."""

from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tests.emulated_cluster import cluster
from tests.unit.scraped_cluster import Scrape

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.router.api_keys import ROUTER_BY_ANY_NAME, ApiKeys, client_headers, engine_headers
from dualpath.router.foreign_pages import AllowedHosts
from dualpath.router.http.scheduler_process import scheduler_app
from dualpath.router.http.server import serving_app
from dualpath.router.settings import RouterSettings
from dualpath_lab.emulated.engine_server import EngineServer
from dualpath_lab.emulated.router_server import RouterServer

JSON = {"content-type": "application/json"}
OURS = {"host": "127.0.0.1:8000"}
READING = ("GET", "HEAD", "OPTIONS")


def status(method: str, headers: dict[str, str], *allowed: str, own: str = "") -> int:
    def header(name: str) -> list[str]:
        return [headers[name]] if name in headers else []

    refused = AllowedHosts(allowed, (own,)).refusal(method, header)
    return 200 if refused is None else refused.status


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8000", "[::1]:8000", "10.1.2.3", "localhost:8000", "router:8000", "a-b_1"),
        *("LOCALHOST", "x.localhost:80", "router.", "ours.example:8000", "OURS.example"),
    ],
)
def test_a_server_is_called_by_its_address_or_a_name_that_strangers_cannot_register(host):
    assert status("POST", {**JSON, "host": host}, own="ours.example") == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"),
        *(
            "127.0.0.1@evil.example",
            "ours.example.evil.example",
            "notours.example",
            "",
            "?",
            "[::1",
        ),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PUT"])
def test_a_page_whose_name_resolves_to_our_address_is_refused(host, method):
    """DNS rebinding: to the browser such a page and our server are one site."""
    same_site = {**JSON, "host": host, "origin": f"http://{host}"}
    assert status(method, same_site, own="ours.example") == 403
    assert status(method, {**JSON, "host": host}, own="ours.example") == 403


@pytest.mark.parametrize(
    "origin",
    [
        *("http://evil.example", "null", "", "http://localhost:3000", "http://127.0.0.1:8001"),
        *("http://127.0.0.1", "127.0.0.1:8000", "http://127.0.0.1:8000.evil.example", "file://"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_a_page_from_elsewhere_is_refused(origin, method):
    assert status(method, {**OURS, **JSON, "origin": origin}) == 403


def test_our_own_page_and_programs_are_served():
    assert status("POST", {**OURS, **JSON, "origin": "http://127.0.0.1:8000"}) == 200
    assert status("POST", {**OURS, **JSON, "origin": "https://127.0.0.1:8000"}) == 200
    assert status("POST", {**OURS, **JSON}) == 200
    assert status("POST", JSON) == 200  # HTTP/1.0 has no Host; no browser sends that
    assert status("DELETE", OURS) == 200


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "text/plain; application/json"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "Application/JSON"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({"content-type": "text/plain", "authorization": "Bearer EMPTY"}, 200),
        ({"x-requested-with": "curl"}, 200),
    ],
)
def test_a_post_has_what_a_page_cannot_send_without_asking_first(headers, expected):
    assert status("POST", {**OURS, **headers}) == expected


def test_names_of_proxies_are_allowed_by_a_setting():
    proxy = {**JSON, "host": "chat.example.com", "origin": "https://chat.example.com"}
    for allowed in ("chat.example.com", "Chat.Example.com.", ".example.com", "*"):
        assert status("POST", proxy, allowed) == 200
        # The proxy may also call us by our address.
        assert status("POST", {**proxy, **OURS}, allowed) == 200
    for allowed in ("example.com", "other.example.com", ".xample.com", "at.example.com"):
        assert status("POST", proxy, allowed) == 403
        assert status("POST", {**proxy, **OURS}, allowed) == 403


def test_with_keys_only_a_request_with_a_key_is_served_from_wherever():
    def header(name: str) -> list[str]:
        return ["http://evil.example"] if name == "origin" else []

    assert ApiKeys(["k"]).foreign("POST", "/v1/completions", header) is None
    assert ApiKeys([], {}).foreign("POST", "/v1/completions", header) is not None
    assert ApiKeys([], {}).foreign("GET", "/health", header) is None


@pytest.mark.parametrize("empty", ["", " ", "\n"])
def test_a_key_that_is_given_and_empty_is_an_error(empty):
    """A variable that was never filled would open a server, or call one without its key."""
    for keys in ([empty], ["k", empty]):
        with pytest.raises(ConfigError, match="an empty key"):
            ApiKeys(keys, {})
    with pytest.raises(ConfigError, match="VLLM_API_KEY is set and empty; give it a value or"):
        ApiKeys([], {"VLLM_API_KEY": empty})
    with pytest.raises(ConfigError, match="VLLM_API_KEY is set and empty"):
        client_headers([], {"VLLM_API_KEY": empty})
    with pytest.raises(ConfigError, match="DUALPATH_ENGINE_API_KEY is set and empty"):
        engine_headers({"DUALPATH_ENGINE_API_KEY": empty})


# ---------------------------------------------------------------------- every route

ATTACKS = (
    {"Host": "evil.example", "Origin": "http://evil.example", **JSON},
    {"Origin": "http://evil.example", **JSON},
    {"Origin": "null", "Content-Type": "text/plain"},
    {"Host": "evil.example:8000", **JSON},
)
#: Those in which the page is of another site than the address that it calls.
OTHER_SITES = ATTACKS[1:3]
#: What a page can send without an Origin, in browsers that omit it.
FORMS = (
    {"Content-Type": "text/plain"},
    {"Content-Type": "application/x-www-form-urlencoded"},
)


def routes(app: web.Application) -> list[tuple[str, str]]:
    """Methods and paths of an application, with a name for each placeholder."""
    found = [(route.method, route.resource) for route in app.router.routes()]
    return [
        (method, resource.canonical.replace("{engine_id}", "decode-0").replace("{session_id}", "s"))
        for method, resource in found
        if resource is not None
    ]


async def answers(http: aiohttp.ClientSession, url: str, method: str, *all_headers) -> set[int]:
    found = set()
    for headers in all_headers:
        data = None if method in READING else b"{}"
        skipped = ("Content-Type",)  # aiohttp would add one of its own
        async with http.request(
            method, url, data=data, headers=headers, skip_auto_headers=skipped
        ) as answer:
            found.add(answer.status)
    return found


async def test_no_route_of_any_light_server_serves_a_foreign_page(tmp_path: Path) -> None:
    async with cluster(tmp_path, Mode.DUALPATH) as made:
        engine = made.engines["decode-0"]
        scheduler = scheduler_app(made.service.scheduler)
        async with serving_app(scheduler, "127.0.0.1", 0) as port:
            servers = {
                made.endpoint: RouterServer(made.service).app(),
                f"http://127.0.0.1:{port}": scheduler,
                engine.api_url: EngineServer(engine.plane, None).app(),  # type: ignore[arg-type]
            }
            for url, app in servers.items():
                asked = routes(app)
                assert any(method == "POST" for method, _ in asked)
                for method, path in asked:
                    opened = path in ("/health", "/dashboard") or (
                        path == "/metrics" and url == engine.api_url
                    )
                    # A page whose name resolves to a router is one site with it.
                    by_name = path in ROUTER_BY_ANY_NAME and url != engine.api_url
                    if not opened:
                        attacks = OTHER_SITES if by_name else ATTACKS
                        assert await answers(made.http, url + path, method, *attacks) == {403}
                        if method == "POST":
                            assert await answers(made.http, url + path, method, *FORMS) == {415}
        # Nothing has been paused, and nobody's role has changed.
        assert (await made.post([1, 2, 3], 1))[0] == 200
        async with made.http.get(f"{made.endpoint}/metrics") as response:
            scrape = Scrape(await response.text())
        assert scrape.value("dualpath:http_refusals_total", reason="foreign-page") > 0


async def test_a_router_serves_tokens_and_metrics_by_any_name_and_nothing_else(tmp_path: Path):
    async with cluster(tmp_path, Mode.DUALPATH) as made:
        named = {"Host": "gpu-box.corp.example:8000"}
        body = {"prompt": [1, 2, 3], "max_tokens": 1}
        async with made.http.post(
            f"{made.endpoint}/v1/completions", json=body, headers=named
        ) as answer:
            assert answer.status == 200
        for path, status in (("/metrics", 200), ("/v1/models", 200), ("/dualpath/v1/status", 403)):
            async with made.http.get(made.endpoint + path, headers=named) as answer:
                assert answer.status == status, path


async def test_an_operator_pauses_and_resumes_an_engine(tmp_path: Path) -> None:
    settings = RouterSettings(mode=Mode.DUALPATH, allowed_hosts=("ops.example",))
    async with cluster(tmp_path, Mode.DUALPATH, router=settings) as made:
        place = f"{made.endpoint}/dualpath/v1/engines/decode-0/pause"
        page = {"Host": "ops.example", "Origin": "https://ops.example", **JSON}
        assert await answers(made.http, place, "POST", JSON, page) == {200}
        assert await answers(made.http, place, "DELETE", {}, page) == {200}
