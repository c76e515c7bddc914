"""Commands of pages that start a cluster, with this machine's own folders and ports."""

import http.client
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from tests.docs_blocks import ROOT, Block, blocks, commands
from tests.guard import GUARD_S

from dualpath.launch.ports import claim_port
from dualpath.launch.process import SpawnedProcess

#: Ports that pages name; other programs may use them here.
PORTS = ("5700", "5701", "5710", "5711", "8000", "8001", "8002")


class TypedPages:
    """The commands of some pages, run in ``folder``.

    ``model`` is where they say MODEL or FOLDER; ``also`` has more of what has another name here.
    """

    def __init__(
        self, folder: Path, model: str = "MODEL", also: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.model = model
        self._here = {port: str(claim_port()) for port in PORTS}
        self.endpoint = f"http://127.0.0.1:{self._here['8000']}"
        control = self._here["5700"]
        #: Values set by environment variables, which commands leave at their defaults.
        self._variables = {
            "serve": {"DUALPATH_CLUSTER_PORT": self._here["8000"]},
            "scheduler": {
                "DUALPATH_SCHEDULER_PORT": self._here["8001"],
                "DUALPATH_ROUTER_CONTROL_PORT": control,
            },
            "emulate": {
                "DUALPATH_ROUTER_CONTROL_PORT": control,
                "DUALPATH_ENGINE_ROUTER": f"tcp://127.0.0.1:{control}",
            },
            "router": {
                "DUALPATH_ENDPOINT_PORT": self._here["8000"],
                "DUALPATH_ROUTER_CONTROL_PORT": control,
            },
        }
        self._here |= {"/mnt/kv": str(folder / "kv"), "MODEL": model, "FOLDER": model}
        self._here |= also or {}

    def commands(self, page: str, wanted: Callable[[Block], bool]) -> Iterator[list[str]]:
        """Yield the words of the commands in the blocks of a how-to page that are ``wanted``."""
        found = [b for b in blocks(ROOT / "docs" / "how-to" / page) if wanted(b)]
        assert found, f"{page} shows none of these commands"
        for block in found:
            for words in commands(block):
                yield [self._translated(word) for word in words]

    def spawn(self, name: str, words: list[str]) -> SpawnedProcess:
        """Start a `dualpath` command as its reader would; its log is in the folder."""
        assert words[0] == "dualpath"
        variables = {**self._variables.get(words[1], {}), "PYTHONPATH": os.pathsep.join(sys.path)}
        return SpawnedProcess(
            name,
            [sys.executable, "-m", "dualpath.cli.main", *words[1:]],
            self.folder / f"{name}.log",
            {**os.environ, **variables},
            folder=self.folder,
        )

    def stored(self) -> list[Path]:
        """Return the blocks of requests, without the blocks of an engine's read measurement."""
        found = (self.folder / "kv").rglob("*.kv")
        return [path for path in found if "read-probe" not in str(path)]

    def port(self, named: str) -> str:
        """Return the port that is used here for the port ``named`` of the pages."""
        return self._here[named]

    def _translated(self, word: str) -> str:
        word = re.sub(r"\b10\.0\.0\.\d\b|0\.0\.0\.0", "127.0.0.1", word)
        pattern = "|".join(rf"(?<![\w/]){re.escape(known)}\b" for known in self._here)
        return re.sub(pattern, lambda found: self._here[found[0]], word)


def types(*beginning: str) -> Callable[[Block], bool]:
    """Select the blocks by the beginning of their first command."""

    def wanted(block: Block) -> bool:
        return block.language == "console" and commands(block)[0][: len(beginning)] == [*beginning]

    return wanted


def curl(words: list[str]) -> bytes:
    """Send the request of a `curl` command; return the body of a successful answer."""
    headers: dict[str, str] = {}
    method, body = "", None
    url = next(word for word in words if "://" in word)
    options = [word for word in words[1:] if word != url]
    for option, value in zip(options[::2], options[1::2], strict=True):
        match option:
            case "-H":
                name, _, text = value.partition(": ")
                headers[name] = text
            case "-d":
                body = value.encode()
            case "-X":
                method = value
            case _:
                raise AssertionError(f"curl {option} is not known here")
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=GUARD_S)
    try:
        asks = method or ("POST" if body else "GET")
        connection.request(asks, urlsplit(url).path, body, headers)
        response = connection.getresponse()
        content = response.read()
        assert response.status == 200, content
        return content
    finally:
        connection.close()
