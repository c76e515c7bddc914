"""What the live page is sent: sums and rates of what engines reported and requests met."""

import base64
import hashlib
import re
from importlib.resources import files

import aiohttp
import msgspec
import pytest
from tests.unit.dashboard_cluster import BUFFER_TOKENS, ReportedCluster, large_cluster

from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError
from dualpath.core.sessions import Event
from dualpath.router.http.server import serving_app
from dualpath.router.observe.dashboard.board import MAX_SAMPLES, SCHEMA, Sample
from dualpath.router.observe.dashboard.page_file import SCRIPTS, dashboard_page
from dualpath_lab.emulated.router_server import RouterServer


@pytest.fixture
def cluster() -> ReportedCluster:
    made = ReportedCluster()
    made.join("pe-0", Role.PREFILL)
    made.join("de-0", Role.DECODE)
    made.report("pe-0", storage_read_bytes=5_000)
    made.report("de-0")
    made.after(1.0)
    return made


def samples(report):
    history = report["history"]
    rows = msgspec.to_builtins(history["rows"])
    return [dict(zip(history["columns"], row, strict=True)) for row in rows]


def node(report, role):
    (found,) = [each for each in report["nodes"] if each["role"] == role.value]
    return found


def test_bytes_become_rates_of_steps_nodes_and_paths(cluster):
    cluster.report("pe-0", storage_read_bytes=9_000, pe_to_de_bytes=600, miss_bytes=600)
    cluster.report("de-0", storage_read_bytes=2_000, h2d_bytes=2_600)
    cluster.after(2.0)
    report = cluster.dashboard.report()
    moving = {row["step"]: row["bytes_per_s"] for row in report["steps"] if row["bytes_per_s"]}
    assert moving == {"4a.1-2": 2000, "4b.1-2": 1000, "miss": 300, "8-9": 1300}
    prefill, decode = node(report, Role.PREFILL), node(report, Role.DECODE)
    assert (prefill["snic_read_bytes_per_s"], prefill["cnic_bytes_per_s"]) == (2000, 300)
    assert (decode["snic_read_bytes_per_s"], decode["cnic_bytes_per_s"]) == (1000, 1300)
    latest = samples(report)[-1]
    assert (latest["pe_read_bytes"], latest["de_read_bytes"]) == (4000, 2000)
    assert latest["interval_s"] == report["window_s"] == 2.0


def test_an_engine_that_restarts_or_joins_late_shows_no_leap(cluster):
    cluster.join("pe-0", Role.PREFILL, epoch="second")
    cluster.report("pe-0", storage_read_bytes=70_000)
    cluster.join("pe-1", Role.PREFILL)
    cluster.report("pe-1", storage_read_bytes=1e12)
    cluster.after(1.0)
    assert samples(cluster.dashboard.report())[-1]["pe_read_bytes"] == 0
    cluster.report("pe-0", storage_read_bytes=70_500)
    cluster.after(1.0)
    assert samples(cluster.dashboard.report())[-1]["pe_read_bytes"] == 500


def test_a_nodes_engines_are_added_up_while_they_live(cluster):
    cluster.join("pe-1", Role.PREFILL, node="node of pe-0")
    cluster.report("pe-0", read_queue_tokens=30, free_buffer_tokens=BUFFER_TOKENS - 100)
    cluster.report("pe-1", read_queue_tokens=12, free_buffer_tokens=BUFFER_TOKENS - 10)
    cluster.after(1.0)
    both = node(cluster.dashboard.report(), Role.PREFILL)
    assert (both["engines_up"], both["engines"]) == (2, 2)
    assert (both["read_queue_tokens"], both["buffer_used_tokens"]) == (42, 110)
    assert both["snic_limit_bytes_per_s"] == 2e6
    lost = cluster.registry.get("pe-1")
    lost.machine.on(Event.SILENT)
    cluster.after(6.0)
    report = cluster.dashboard.report()
    one = node(report, Role.PREFILL)
    assert (one["engines_up"], one["engines"], one["buffer_used_tokens"]) == (1, 2, 100)
    assert [(each["engine_id"], each["silent_s"]) for each in report["lost_engines"]] == [
        ("pe-1", 7)
    ]
    lost.left = True
    cluster.after(1.0)
    assert node(cluster.dashboard.report(), Role.PREFILL)["engines"] == 1
    assert cluster.dashboard.report()["engines"]["prefill"] == {"up": 1, "lost": 0, "left": 1}


def test_every_first_token_enters_one_sample_also_of_requests_that_are_over(cluster):
    long, short = cluster.request("long"), cluster.request("short")
    cluster.now_s += 0.2
    short.streamed(1)
    short.streamed(4)
    cluster.end(short)
    cluster.after(0.8)
    cluster.now_s += 1.0
    long.streamed(1)
    cluster.after(0.0)
    cluster.after(1.0)
    first, second, third = samples(cluster.dashboard.report())[-3:]
    assert first["ttft_p50_s"] == first["ttft_p90_s"] == pytest.approx(0.2)
    assert second["ttft_p50_s"] == pytest.approx(2.0)
    assert third["ttft_p50_s"] is None
    assert [s["generated_tokens"] for s in (first, second, third)] == [5, 1, 0]
    recent = cluster.dashboard.report()["recent"]
    assert (recent["requests"], recent["ttft_p50_s"]) == (2, pytest.approx(1.1))
    cluster.after(60.0)
    assert cluster.dashboard.report()["recent"]["ttft_p50_s"] is None


def test_history_is_bounded_and_sent_from_where_a_page_left_off(cluster):
    assert len(samples(cluster.dashboard.report())) == 1
    for _ in range(MAX_SAMPLES):
        cluster.after(1.0)
    report = cluster.dashboard.report()
    assert (len(report["history"]["rows"]), report["seq"]) == (MAX_SAMPLES, MAX_SAMPLES + 1)
    assert samples(cluster.dashboard.report(str(report["seq"]))) == []
    cluster.after(1.0)
    assert [s["time_s"] for s in samples(cluster.dashboard.report(str(report["seq"])))] == [
        cluster.now_s
    ]
    # A number that this router has not reached is one of a former router's.
    assert len(samples(cluster.dashboard.report("99999"))) == MAX_SAMPLES
    for wrong in ("-1", "1.5", "", "٣", "9" * 4301):
        with pytest.raises(BadRequestError, match="at most 12 digits"):
            cluster.dashboard.report(wrong)


def test_the_latest_assignments_come_newest_first(cluster):
    for number in range(300):
        cluster.assign(f"r-{number}", "pe-0", "de-0")
    notes = cluster.dashboard.report()["assignments"]
    assert [note["request_id"] for note in notes[:2]] == ["r-299", "r-298"]
    assert len(notes) == 16
    assert notes[0]["read_reason"] == "shorter-queue"


def test_reports_of_routers_with_none_and_512_engines_are_small():
    assert ReportedCluster().dashboard.report()["nodes"] == []
    report = large_cluster(64, 8).dashboard.report()
    assert len(report["nodes"]) == 64
    assert report["engines"]["prefill"] == {"up": 255, "lost": 1, "left": 0}
    assert len(msgspec.json.encode(report)) < 40_000


def test_the_page_is_whole_and_its_policy_allows_nothing_else():
    page = dashboard_page()
    html = page.body.decode()
    policy = page.headers["Content-Security-Policy"]
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (text,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    # SVG's namespace is a name; nothing is loaded from anywhere.
    assert set(re.findall(r"https?://[^\"' )]+", html)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|eval|document\.write)\b", html)
    assert not re.search(r"\sstyle=|\son\w+=\"", html)


def test_all_scripts_of_the_package_are_in_the_page():
    folder = files("dualpath.router.observe.dashboard") / "page"
    assert {each.name for each in folder.iterdir()} == {*SCRIPTS, "page.css", "page.html"}


async def test_the_light_router_serves_page_and_data(cluster):
    app = RouterServer(cluster.service).app()
    async with serving_app(app, "127.0.0.1", 0) as port, aiohttp.ClientSession() as http:
        base = f"http://127.0.0.1:{port}"
        async with http.get(f"{base}/dashboard") as page:
            assert (page.status, page.content_type) == (200, "text/html")
            assert "script-src 'sha256-" in page.headers["Content-Security-Policy"]
            assert await page.read() == dashboard_page().body
        async with http.get(f"{base}/dualpath/v1/dashboard?since=1") as answer:
            body = await answer.json()
        assert (body["schema"], body["seq"], body["history"]["rows"]) == (SCHEMA, 1, [])
        assert body["history"]["columns"] == list(Sample.__struct_fields__)
        async with http.get(f"{base}/dualpath/v1/dashboard?since=x") as refusal:
            assert refusal.status == 400
            assert "since is 'x'" in await refusal.text()
