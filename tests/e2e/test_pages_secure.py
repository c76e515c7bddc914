"""The commands of the page on security, and KV in its own traffic class; engines are emulated."""

import http.client
import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.docs_blocks import ROOT, Block
from tests.e2e.emulated_reader import Reader, runs
from tests.e2e.typed_pages import types
from tests.guard import GUARD_S
from tests.listeners import open_listeners

from dualpath.launch.process import Supervisor
from dualpath.transport.nixl import nixl_package

pytest.importorskip(nixl_package())
pytestmark = pytest.mark.nixl

PAGE = ROOT / "docs" / "how-to" / "security.md"


def makes_keys(block: Block) -> bool:
    """Select commands that create a secret or a key."""
    return block.language == "console" and "openssl rand" in block.text


def status(url: str, *headers: tuple[str, str]) -> int:
    """Return the status of a GET."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=GUARD_S)
    try:
        connection.request("GET", parts.path, headers=dict(headers))
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_cluster_with_a_secret_keys_and_sealed_blocks_serves_clients_with_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Supervisor() as processes:
        reader = Reader(tmp_path, processes)
        for words in reader.pages.commands("security.md", makes_keys):
            if words[0] in ("openssl", "chmod"):
                subprocess.run(" ".join(words), shell=True, check=True, timeout=GUARD_S)
        secret = ("--cluster-secret-file", "secret")
        reader.serves_one_of_each(
            [*secret, "--api-keys", "KEY,OTHER", "--open-metrics"],
            [*secret, "--storage-key-file", "storage.key"],
        )
        opened = re.findall(r"^\| (`/.*?) \|", PAGE.read_text(), re.MULTILINE)
        paths = re.findall(r"`(/\w+)`", " ".join(opened))
        assert len(paths) >= 4
        endpoint = reader.pages.endpoint
        # The light router has no /ping and answers 404 with any key.
        assert not [path for path in paths if status(endpoint + path) == 401]
        for path in ("/v1/models", "/dualpath/v1/status", "/nowhere"):
            assert status(endpoint + path) == 401
        assert status(f"{endpoint}/v1/models", ("Authorization", "Bearer KEY")) == 200
        reader.asks("-H", "Authorization: Bearer OTHER")
        reader.waits_for_blocks(4)
        assert "encrypted" in runs(["dualpath", "storage", "ls", "kv"], capsys)
        verify = ["dualpath", "storage", "verify", "kv", "--storage-key-file", "storage.key"]
        assert "4 blocks" in (verified := runs(verify, capsys))
        assert "; 0 corrupt" in verified


def test_an_engine_puts_its_kv_on_the_ports_of_the_lane(tmp_path: Path) -> None:
    with Supervisor() as processes:
        reader = Reader(tmp_path, processes)
        _, decode = reader.pages.commands("qos.md", types("dualpath", "serve"))
        reader.types(["dualpath", "emulate", "router", "--port", reader.pages.port("8000")])
        engine = reader.types(decode)
        engine.wait_for_line("dualpath emulated decode engine", GUARD_S)
        first, _, last = decode[-1].rpartition("=")[2].partition("-")
        ports = [int(address.rpartition(":")[2]) for address in open_listeners([engine.pid])]
        assert ports
        assert all(int(first) <= port <= int(last) for port in ports)
