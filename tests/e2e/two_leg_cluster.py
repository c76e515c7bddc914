"""A scheduler and plain `vllm serve` engines behind other proxies, beside a plain engine."""

import contextlib
import http.client
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import zmq
from tests.e2e.plain_engine import START_S, PlainEngine, tiny_model, until
from tests.e2e.test_existing_vllm import ENTRY_POINT, existing_command
from tests.guard import GUARD_S

from dualpath.launch.commands import ENGINE_ENTRY
from dualpath.launch.fork_server import ForkedProcess
from dualpath.launch.ports import claim_port
from dualpath.launch.process import SpawnedProcess, Supervisor

BLOCK_TOKENS = 64
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


class Served:
    """A scheduler, a prefill engine, decode engines, and a plain engine with the same model.

    The engines are `prefill`, `decode` and, if there are more, `decode-1` and so on.
    """

    def __init__(self, folder: Path, stack: ExitStack, decode: int = 1) -> None:
        self._folder = folder
        #: KV events of the decode engine, as vLLM publishes them.
        self.events = stack.enter_context(zmq.Context()).socket(zmq.SUB)
        stack.callback(self.events.close, 0)
        self._started = stack.enter_context(Supervisor())
        (folder / "chat.jinja").write_text(TEMPLATE)
        command = ("scheduler", "--port", "0", "--mode", "split", "--no-dram-tier")
        ports = ("--control-port", "0", "--front-ends-port", "0", "--second-leg-timeout-s", "5")
        scheduler = SpawnedProcess(
            "scheduler",
            (sys.executable, "-m", "dualpath.cli.main", *command, *ports),
            folder / "scheduler.log",
            {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._started.add(scheduler)
        line = scheduler.wait_for_line("dualpath scheduler: cluster at", GUARD_S)
        (self._cluster,) = re.findall(r"cluster at (http://[\d.:]+)", line)
        control, front_ends = re.findall(r"tcp://[\d.:]+", line)
        self.front_ends = front_ends
        names = ["prefill", "decode", *(f"decode-{number}" for number in range(1, decode))]
        self.ports = {name: self._engine(name, control, front_ends) for name in names}
        self.plain = stack.enter_context(
            PlainEngine(tiny_model(), folder, BLOCK_TOKENS, *self._chat())
        )
        until(self._complete, "an engine of each role", START_S)

    def _chat(self) -> tuple[str, str]:
        return "--chat-template", str(self._folder / "chat.jinja")

    def _engine(self, name: str, control: str, front_ends: str) -> int:
        port = claim_port()
        extra = {
            "role": name.partition("-")[0],
            "engine_id": name,
            "router": control,
            "two_leg_scheduler": front_ends,
            "storage": str(self._folder / "storage"),
            "mode": "split",
            "buffer_bytes": 96 << 20,
            "profile": "off",
        }
        config = {
            "kv_connector": "DualPathConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        command = [
            *existing_command(tiny_model(), port),
            *("--kv-transfer-config", json.dumps(config), *self._chat()),
            "--enable-prompt-tokens-details",
        ]
        if name == "decode":
            events_port = claim_port()
            events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{events_port}"}
            command += ["--kv-events-config", json.dumps(events)]
            self.events.setsockopt(zmq.SUBSCRIBE, b"")
            self.events.connect(f"tcp://127.0.0.1:{events_port}")
        log = self._folder / f"{name}.log"
        self._started.add(ForkedProcess(name, ENGINE_ENTRY, command, log))
        return port

    def _complete(self) -> bool:
        for process in self._started.processes:
            assert process.alive, process.log_tail()
        return {e["engine_id"] for e in self.status()["engines"] if e["alive"]} == set(self.ports)

    def status(self) -> dict[str, Any]:
        """Return the scheduler's status."""
        connection = http.client.HTTPConnection(urlsplit(self._cluster).netloc, timeout=GUARD_S)
        connection.request("GET", "/dualpath/v1/status")
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        return found

    def metrics(self) -> str:
        """Return the scheduler's metrics as text."""
        connection = http.client.HTTPConnection(urlsplit(self._cluster).netloc, timeout=GUARD_S)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return text

    def read_bytes(self) -> dict[str, int]:
        """Bytes that each engine has read from storage."""
        found: dict[str, int] = self.status()["counters"]["snic_read_bytes"]
        return found

    def idle(self) -> bool:
        """Whether no engine counts a request or holds any of its buffer."""
        status = self.status()
        engines = status["engines"]
        free = {engine["engine_id"]: engine["free_buffer_tokens"] for engine in engines}
        counts = status["waiting"], status["running"], sum(engine["seq"] for engine in engines)
        return counts == (0, 0, 0) and free == self._buffers

    def note_buffers(self) -> None:
        """Remember the free buffers of engines that have no request."""
        self._buffers = {e["engine_id"]: e["free_buffer_tokens"] for e in self.status()["engines"]}

    def log(self, name: str) -> str:
        """Return what the process of this log file has written."""
        return (self._folder / name).read_text(errors="replace")

    def url(self, name: str) -> str:
        """Return the base URL of an engine."""
        return f"http://127.0.0.1:{self.ports[name]}"


@contextlib.contextmanager
def served_engines(folder: Path, decode: int = 1) -> Iterator[Served]:
    """Run a ``Served``; its engines find our plugin, however dualpath is installed here."""
    metadata = folder / "site" / "dualpath-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dualpath\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINT)
    with pytest.MonkeyPatch.context() as patched, ExitStack() as stack:
        patched.syspath_prepend(str(metadata.parent))
        found = Served(folder, stack, decode)
        found.note_buffers()
        yield found
