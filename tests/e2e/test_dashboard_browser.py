"""The live page in a real browser: what it shows, refuses, and reports without a router."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from aiohttp import web
from tests.e2e.chromium import Tab, find_chromium, open_tab, running_chromium
from tests.emulated_cluster import cluster
from tests.unit.dashboard_cluster import ReportedCluster, large_cluster
from tests.unit.scraped_cluster import all_reported
from tests.unit.test_cli_simulate import CLUSTER, COSTS, TRACE
from tests.unit.test_workload_report import result, turn

from dualpath.cli.main import main
from dualpath.core.cluster import GroupRank, Role
from dualpath.core.modes import Mode
from dualpath.core.sessions import Event
from dualpath.router.http.server import serving_app
from dualpath.router.observe.dashboard.page_file import dashboard_page
from dualpath.router.settings import RouterSettings
from dualpath_lab.emulated.router_server import RouterServer

PROMPT = list(range(1, 50))
MARKUP = "<img src=x onerror=document.title='owned'>"
NO_OVERFLOW = "document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="module")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium is installed; the page is tested in none")
    with running_chromium(program, tmp_path_factory.mktemp("profile")) as address:
        yield address


@pytest.fixture
async def tab(devtools: str) -> AsyncIterator[Tab]:
    async with open_tab(devtools) as opened:
        yield opened
        assert opened.troubles == []


@contextlib.asynccontextmanager
async def serving(reported: ReportedCluster) -> AsyncIterator[str]:
    async with serving_app(RouterServer(reported.service).app(), "127.0.0.1", 0) as port:
        yield f"http://127.0.0.1:{port}/dashboard"


def text_of(selector: str) -> str:
    return f"document.querySelector({selector!r}).innerText"


async def live(tab: Tab, url: str) -> None:
    await tab.go(url)
    await tab.until("document.documentElement.dataset.state === 'live'")


async def test_a_served_request_is_seen_and_then_that_the_router_is_gone(
    tab: Tab, tmp_path: Path
) -> None:
    # Without DRAM as a tier the second request is read from storage.
    settings = RouterSettings(mode=Mode.DUALPATH, dram_tier=False)
    async with cluster(tmp_path, Mode.DUALPATH, prefill=2, decode=2, router=settings) as made:
        await live(tab, f"{made.endpoint}/dashboard")
        # From here on all that is read counts: a dashboard knows nothing of the time before.
        await all_reported(made)
        made.service.scheduler.dashboard.sample()
        for _ in range(2):
            await made.ask(PROMPT, 4)
            await made.stored()
        await tab.until("document.querySelectorAll('.panel.full tbody tr').length === 2")
        await tab.until(f"{text_of('.tiles')}.includes('4 up')")
        await tab.until(f"{text_of('.tiles')}.includes('PE 100 %')")
        assignments = await tab.value(text_of(".panel.full"))
        assert "shorter-queue" in assignments or "tie" in assignments
        assert "no-hit" in assignments
        assert "mode dualpath" in await tab.value(text_of("#subject"))
    await tab.until("document.documentElement.dataset.state === 'lost'")
    assert "Connection lost" in await tab.value(text_of("#status"))
    assert "Trying again" in await tab.value(text_of("#problem"))


async def test_a_router_with_keys_is_shown_to_a_reader_with_a_key(tab: Tab, tmp_path: Path) -> None:
    settings = RouterSettings(mode=Mode.DUALPATH, api_keys=("right",))
    async with cluster(tmp_path, Mode.DUALPATH, router=settings) as made:
        await tab.go(f"{made.endpoint}/dashboard#key=wrong")
        await tab.until(f"{text_of('#problem')}.includes('does not accept')")
        await tab.value("document.getElementById('key').value = 'right'")
        await tab.value("document.getElementById('unlock').click()")
        await tab.until("document.documentElement.dataset.state === 'live'")
        # The key is not part of the address and is still there after a reload.
        await live(tab, f"{made.endpoint}/dashboard")
        assert await tab.value("location.hash") == ""


async def test_names_of_engines_are_text_whatever_they_are(tab: Tab) -> None:
    reported = ReportedCluster()
    reported.join(MARKUP, Role.PREFILL, node=MARKUP)
    reported.join("de-0", Role.DECODE)
    reported.report(MARKUP)
    reported.assign(MARKUP, MARKUP, "de-0")
    reported.registry.all()[0].machine.on(Event.SILENT)
    reported.after(1.0)
    async with serving(reported) as url:
        await live(tab, url)
        assert (await tab.value("document.body.innerText")).count(MARKUP) >= 3
        assert await tab.value("document.images.length") == 0
        assert await tab.value("document.title") == "DualPath"


async def test_lost_engines_are_listed_with_their_group(tab: Tab) -> None:
    reported = ReportedCluster()
    alone = reported.join("pe-0", Role.PREFILL)
    rank = reported.join("de-0", Role.DECODE, dp=GroupRank("rack", "first", 0, 1))
    shown = "[...document.querySelector('.panel.full:last-of-type').querySelectorAll('th, td')]"
    words = f"{shown}.map((cell) => cell.innerText)"
    alone.machine.on(Event.SILENT)
    async with serving(reported) as url:
        await live(tab, url)
        assert "group" not in await tab.value(words)
        rank.machine.on(Event.SILENT)
        await tab.until(f"{words}.includes('rack')")
        assert {"group", "\u2013"} <= {*await tab.value(words)}


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("nodes", [2, 64])
async def test_one_node_or_many_fit_into_either_width(tab: Tab, width: int, nodes: int) -> None:
    async with serving(large_cluster(nodes, 2)) as url:
        await tab.size(width, 900)
        await live(tab, url)
        assert await tab.value(NO_OVERFLOW)
        assert (
            await tab.value("document.querySelectorAll('.pe.panel tbody tr').length") == nodes / 2
        )
        assert "1 lost" in await tab.value(text_of(".tiles"))
        cells = await tab.value(
            "document.querySelectorAll('.drawing .cell, .drawing .lost').length"
        )
        assert cells == nodes
        outside = """[...document.querySelectorAll('.drawing text')].filter((words) => {
          const inner = words.getBoundingClientRect();
          const outer = words.ownerSVGElement.getBoundingClientRect();
          return inner.left < outer.left - 1 || inner.right > outer.right + 1;
        }).map((words) => words.textContent)"""
        assert await tab.value(outside) == []
        covered = """[...document.querySelectorAll('.drawing .snic text')].filter((words) => {
          const inner = words.getBoundingClientRect();
          const writes = document.querySelector('[data-flow=persist] path').getBoundingClientRect();
          const box = words.parentNode.querySelector('rect').getBoundingClientRect();
          return inner.left < box.left + 3 || inner.right > box.right - 3
            || (inner.left < writes.left && inner.right > writes.left);
        }).map((words) => words.textContent)"""
        assert await tab.value(covered) == []


async def test_both_themes_follow_the_system_until_one_is_chosen(tab: Tab) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    async with serving(large_cluster(2, 1)) as url:
        await tab.prefer("dark")
        await live(tab, url)
        dark = await tab.value(background)
        await tab.prefer("light")
        light = await tab.value(background)
        assert light != dark
        choose = """{ const choice = document.getElementById('theme'); choice.value = 'dark';
          choice.dispatchEvent(new Event('change')); }"""
        await tab.value(choose)
        assert await tab.value(background) == dark
        await live(tab, url)
        assert await tab.value(background) == dark
        await tab.value("localStorage.clear()")


async def test_the_keyboard_reaches_the_controls_and_reads_a_chart(tab: Tab) -> None:
    async with serving(large_cluster(2, 1)) as url:
        await live(tab, url)
        reached = []
        for _ in range(3):
            await tab.press("Tab")
            reached.append(await tab.value("document.activeElement.id"))
        assert reached == ["pause", "open", "theme"]
        await tab.value("document.querySelector('.plot svg').focus()")
        await tab.press("ArrowLeft")
        assert await tab.value("document.querySelector('.plot .cursor') !== null")
        assert "ago" in await tab.value(text_of(".legend"))


async def test_finished_runs_open_from_picker_drop_and_address(tab: Tab, tmp_path: Path) -> None:
    replay = result("dualpath", 2.5, turn(0), turn(1, error=MARKUP, ttft_s=None))
    replay_text = msgspec.json.encode(replay).decode()
    path = tmp_path / "replay.json"
    path.write_text(replay_text, encoding="utf-8")
    async with serving(large_cluster(2, 1)) as url:
        await live(tab, url)
        await tab.choose_files("#file", [path])
        await tab.until("document.documentElement.dataset.state === 'file'")
        shown = await tab.value("document.body.innerText")
        assert "replay of t.jsonl" in shown
        assert "PE 57 % · DE 43 %" in shown
        assert MARKUP in shown
        await drop(tab, "simulation.json", simulation(tmp_path))
        await tab.until(f"{text_of('#subject')}.includes('mode basic')")
        await tab.value("document.querySelectorAll('.tabs button')[1].click()")
        assert "mode dualpath" in await tab.value(text_of("#subject"))
        assert "simulated, nothing was served" in await tab.value(text_of("#subject"))
        await tab.value("document.getElementById('live').click()")
        await tab.until("document.documentElement.dataset.state === 'live'")
    async with run_server(replay_text) as url:
        await tab.go(f"{url}?file=run.json")
        await tab.until("document.documentElement.dataset.state === 'file'")
        assert "2.50 s" in await tab.value(text_of(".tiles"))
        await tab.go(f"{url}?file={quote('https://example.org/run.json')}")
        await tab.until("!document.getElementById('problem').hidden")
        assert "another host" in await tab.value(text_of("#problem"))


async def test_on_a_telephone_only_a_failed_turn_shows_an_error(tab: Tab, tmp_path: Path) -> None:
    path = tmp_path / "replay.json"
    failed = turn(1, error="engine pe-0 is lost", ttft_s=None)
    path.write_bytes(msgspec.json.encode(result("dualpath", 2.5, turn(0), failed)))
    async with serving(large_cluster(2, 1)) as url:
        await tab.size(390, 900)
        await live(tab, url)
        await tab.choose_files("#file", [path])
        await tab.until("document.documentElement.dataset.state === 'file'")
        seen = """[...document.querySelectorAll('td[data-name=error]')]
          .filter((cell) => cell.offsetParent).map((cell) => cell.textContent)"""
        assert await tab.value(seen) == ["engine pe-0 is lost"]


async def test_a_saved_copy_opens_runs_without_any_router(tab: Tab, tmp_path: Path) -> None:
    copy = tmp_path / "dashboard.html"
    copy.write_bytes(dashboard_page().body)
    await tab.go(copy.as_uri())
    assert await tab.value(text_of("#status")) == "No run open"
    simulation(tmp_path)
    await tab.choose_files("#file", [tmp_path / "simulation.json"])
    await tab.until(f"{text_of('#subject')}.includes('mode basic')")
    assert "What binds" in await tab.value(text_of(".tiles"))
    assert not await tab.value("document.getElementById('live').checkVisibility()")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("not JSON", "is not JSON"),
        ('{"schema": "dualpath.plan/1"}', 'its schema is "dualpath.plan/1"'),
        ("[1, 2]", "its schema is null"),
        ('{"schema": "__proto__"}', "its schema is"),
        ('{"schema": "dualpath.replay/1", "turns": 3}', "a part of it is missing"),
    ],
)
async def test_other_files_are_refused_and_what_was_shown_stays(
    tab: Tab, content: str, complaint: str
) -> None:
    async with serving(large_cluster(2, 1)) as url:
        await live(tab, url)
        await tab.value("document.getElementById('pause').click()")
        await drop(tab, "some.json", content)
        await tab.until("!document.getElementById('problem').hidden")
        assert complaint in await tab.value(text_of("#problem"))
        assert "2 up" not in await tab.value(text_of("#subject"))
        assert "Prefill nodes" in await tab.value(text_of("#view"))


async def drop(tab: Tab, name: str, content: str) -> None:
    """Drop a file onto the page."""
    await tab.value(
        "{ const dataTransfer = new DataTransfer();"
        f" dataTransfer.items.add(new File([{json.dumps(content)}], {json.dumps(name)}));"
        " document.body.dispatchEvent(new DragEvent('drop', {dataTransfer, bubbles: true})); }"
    )


@contextlib.asynccontextmanager
async def run_server(text: str) -> AsyncIterator[str]:
    """A server of files with the saved page and a run."""

    async def page(request: web.Request) -> web.Response:
        return web.Response(body=dashboard_page().body, headers=dashboard_page().headers)

    async def run(request: web.Request) -> web.Response:
        return web.json_response(text=text)

    app = web.Application()
    app.router.add_get("/saved.html", page)
    app.router.add_get("/run.json", run)
    async with serving_app(app, "127.0.0.1", 0) as port:
        yield f"http://127.0.0.1:{port}/saved.html"


def simulation(folder: Path) -> str:
    """What `dualpath simulate --json` writes."""
    (folder / "c.toml").write_text(CLUSTER, encoding="utf-8")
    (folder / "costs.toml").write_text(COSTS, encoding="utf-8")
    (folder / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in TRACE), "utf-8")
    files = {"cluster": "c.toml", "model": "costs.toml", "trace": "t.jsonl"}
    files["json"] = "simulation.json"
    options = [word for name, file in files.items() for word in (f"--{name}", str(folder / file))]
    modes = ["--mode", "basic,dualpath"]
    assert main(["simulate", *options, "--core", "reference", "--quiet", *modes]) == 0
    return (folder / "simulation.json").read_text(encoding="utf-8")
