"""The system's Chromium without a window, driven over its DevTools protocol; no driver needed."""

import argparse
import asyncio
import base64
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from tests.guard import GUARD_S

from dualpath.launch.process import SpawnedProcess

#: Widths of pictures: a desktop screen, and a telephone in both orientations.
WIDTHS = (1280, 390)
THEMES = ("light", "dark")

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # Containers forbid its sandbox; only the router's own page is opened.
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    """Return the browser's path, None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def running_chromium(program: str, profile: Path) -> Iterator[str]:
    """Run the browser in the block; yields the address of its DevTools."""
    with tempfile.TemporaryDirectory() as logs:
        process = SpawnedProcess(
            "chromium",
            [program, *_OPTIONS, f"--user-data-dir={profile}"],
            Path(logs) / "chromium.log",
        )
        try:
            line = process.wait_for_line("DevTools listening on", GUARD_S)
            yield line.rpartition(" ")[2]
        finally:
            process.kill()
            process.wait(GUARD_S)


@contextlib.contextmanager
def chromium_for(parser: argparse.ArgumentParser) -> Iterator[tuple[str, Path]]:
    """Run the browser for a command; yields the address of its DevTools and a temporary folder.

    Without a browser the command ends with the parser's error.
    """
    program = find_chromium()
    if program is None:
        parser.error("no Chromium is installed; install one")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        home = Path(name)
        with running_chromium(program, home / "profile") as devtools:
            yield devtools, home


class Tab:
    """One page.  ``troubles`` are exceptions, console errors and refusals of its policy."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.troubles: list[str] = []
        self._socket = socket
        self._session: str | None = None
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()

    async def listen(self) -> None:
        """Take answers and events until the socket closes."""
        async for frame in self._socket:
            message = frame.json()
            if (number := message.get("id")) is not None:
                self._answers.pop(number).set_result(message)
            elif message["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif message["method"] == "Runtime.exceptionThrown":
                details = message["params"]["exceptionDetails"]
                self.troubles.append(str(details.get("exception", details)))
            elif message["method"] == "Log.entryAdded":
                entry = message["params"]["entry"]
                # An unreachable router is expected, not a defect of the page.
                if entry["level"] == "error" and entry["source"] != "network":
                    self.troubles.append(entry["text"])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; raises ``AssertionError`` if it fails."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(message)
        async with asyncio.timeout(GUARD_S):
            found = await answer
        assert "error" not in found, (method, found)
        return dict(found["result"])

    async def start(self) -> None:
        """Open the tab."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            await self.call(f"{domain}.enable")

    async def size(self, width: int, height: int) -> None:
        """Set the size of the page in CSS pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def prefer(self, scheme: str) -> None:
        """Let the system prefer "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def go(self, url: str) -> None:
        """Load a page."""
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(GUARD_S):
            await self._loaded.wait()

    async def value(self, expression: str) -> Any:
        """Return an expression's value, awaited if it is a promise."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, (expression, answer)
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        look = (
            f"new Promise((done) => {{ const look = () => ({expression}) ? done(true)"
            " : setTimeout(look, 20); look(); })"
        )
        try:
            await self.value(look)
        except TimeoutError:
            shown = await self.value("document.body.innerText")
            raise AssertionError(f"never true: {expression}; the page shows:\n{shown}") from None

    async def choose_files(self, selector: str, paths: Sequence[Path]) -> None:
        """Choose files in an input."""
        root = (await self.call("DOM.getDocument"))["root"]["nodeId"]
        found = await self.call("DOM.querySelector", nodeId=root, selector=selector)
        files = [str(path) for path in paths]
        await self.call("DOM.setFileInputFiles", files=files, nodeId=found["nodeId"])

    async def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("rawKeyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                            windowsVirtualKeyCode=_KEYS[key])  # fmt: skip

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as PNG."""
        answer = await self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole
        )
        path.write_bytes(base64.b64decode(answer["data"]))


_KEYS = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39}


@contextlib.asynccontextmanager
async def open_tab(devtools: str, width: int = 1280, height: int = 900) -> AsyncIterator[Tab]:
    """Open a tab of a running browser in the block."""
    async with aiohttp.ClientSession() as http:
        socket = await http.ws_connect(devtools, max_msg_size=0)
        tab = Tab(socket)
        listener = asyncio.create_task(tab.listen())
        try:
            await tab.start()
            await tab.size(width, height)
            yield tab
        finally:
            await socket.close()
            await asyncio.wait({listener})
