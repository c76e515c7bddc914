"""`dualpath serve` with a certificate: the supervisor and clients reach the router over HTTPS."""

import asyncio
import ssl
from pathlib import Path

import pytest
from tests.tls_authority import tls_files

pytest.importorskip("vllm")

from tests.e2e.plain_engine import tiny_model

from dualpath.core.errors import EngineLostError
from dualpath.launch.commands import VLLM
from dualpath.launch.local_cluster import LocalCluster
from dualpath.launch.settings import LocalClusterSettings
from dualpath.node.certificates import trusting_only
from dualpath.workload.formats import read_trace
from dualpath.workload.record.recording_proxy import Recorder, RecordingProxy
from dualpath.workload.replay.client import ReplayOptions, replay
from dualpath_lab.emulated.commands import emulated_commands
from dualpath_lab.emulated.settings import EmulatedOptions

TRACE = '{"session_id": "a", "rounds": [[64, 8], [30, 4]]}\n'
ENGINES = emulated_commands(
    EmulatedOptions(
        layers=4,
        kv_bytes_per_token=4096,
        block_tokens=16,
        hbm_bytes=16 << 20,
        vocab_size=256,
        model="smollm2-135m",
    )
)


def test_a_cluster_whose_router_has_a_certificate_serves_clients(tmp_path: Path) -> None:
    files = tls_files(tmp_path)
    (tmp_path / "trace.jsonl").write_text(TRACE)
    settings = LocalClusterSettings(
        transport="memory",
        model=str(tiny_model()),
        storage=str(tmp_path / "kv"),
        block_tokens=16,
        buffer_bytes=4 << 20,
        port=0,
        log_dir=str(tmp_path / "logs"),
        vllm_args=("--ssl-keyfile", files.key, "--ssl-certfile", files.certificate),
    )
    commands = VLLM._replace(engine_entry=ENGINES.engine_entry, engine=ENGINES.engine)
    with LocalCluster(settings, commands=commands) as cluster:
        assert cluster.endpoint.startswith("https://127.0.0.1:")
        urls = [engine["api_url"] for engine in cluster.status()["engines"]]
        assert all(url.startswith("http://127.0.0.1:") for url in urls)
        asyncio.run(_is_served(cluster.endpoint, files.authority, tmp_path))
        with pytest.raises(EngineLostError, match="certificate"):
            asyncio.run(replay([], cluster.endpoint, ReplayOptions()))
        context = trusting_only(files.certificate, files.key)
        asyncio.run(_is_recorded(cluster.endpoint, context, tmp_path))


async def _is_served(endpoint: str, authority: str, folder: Path) -> None:
    options = ReplayOptions(ca_file=authority)
    result = await replay(read_trace(folder / "trace.jsonl"), endpoint, options)
    assert [turn.error for turn in result.turns] == [None, None]
    assert result.turns[1].hit_tokens


async def _is_recorded(endpoint: str, context: ssl.SSLContext, folder: Path) -> None:
    recorder = Recorder(16)
    proxy = RecordingProxy(endpoint, recorder.add, lambda: 0.0, tls=context)
    async with proxy.serving("127.0.0.1", 0) as port:
        sessions = read_trace(folder / "trace.jsonl")
        result = await replay(sessions, f"http://127.0.0.1:{port}", ReplayOptions())
    assert [turn.error for turn in result.turns] == [None, None]
    (session,) = recorder.block_sessions()
    assert session.turns == 2
