"""Plain `vllm serve` commands with one `--kv-transfer-config` join a cluster and serve."""

import http.client
import json
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import HBM_BYTES, MAX_MODEL_LEN, NAME, complete, tiny_model, until
from tests.guard import GUARD_S

from dualpath.core.modes import DEFAULT_MODE
from dualpath.core.transfers import PrefillTransfer, to_transfer_params
from dualpath.launch.commands import ENGINE_ENTRY
from dualpath.launch.fork_server import ForkedProcess
from dualpath.launch.ports import claim_port
from dualpath.router.token_api.wire import GENERATE_PATH

pytestmark = pytest.mark.engine

PROMPT = [10 + index % 300 for index in range(300)]

#: As pip writes it from pyproject.toml; a checkout that is not installed has no entry points.
ENTRY_POINT = "[vllm.general_plugins]\ndualpath = dualpath.vllm.engine_arguments:register\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM find our plugin, however dualpath is installed here."""
    metadata = tmp_path / "site" / "dualpath-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dualpath\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINT)
    monkeypatch.syspath_prepend(str(metadata.parent))


def existing_command(model: Path, port: int) -> list[str]:
    """A plain vLLM server command, without any dualpath options."""
    return [
        "--model", str(model), "--served-model-name", NAME, "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN),
        "--kv-cache-memory-bytes", str(HBM_BYTES), "--enforce-eager",
    ]  # fmt: skip


def transfer(role: str, cluster: EngineCluster) -> list[str]:
    """The one argument that is added, in its shortest form."""
    extra = {
        "role": role,
        "router": f"tcp://127.0.0.1:{cluster.control_port}",
        "storage": cluster.settings.storage,
    }
    config = {
        "kv_connector": "DualPathConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return ["--kv-transfer-config", json.dumps(config)]


def check_direct_requests_fail(port: int) -> None:
    """A prefill engine's layers share regions: a direct request would get garbage, so it fails."""
    status, error = post(port, "/v1/completions", {"model": NAME, "prompt": PROMPT})
    assert (status, "send requests to the router" in error) == (421, True)
    # A transfer in the router's form that is invalid: vLLM's scheduler must fail it.
    transfer = PrefillTransfer(
        request_id="forged", prompt_tokens=len(PROMPT), hit_blocks=0, hit_key_tail=b"", hits=(),
        decode_engine="de", decode_epoch="e", de_slots=(0,),
    )  # fmt: skip
    params = json.loads(msgspec.json.encode(to_transfer_params(transfer)))
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}, "kv_transfer_params": params}
    assert post(port, GENERATE_PATH, body)[0] == 500
    body["sampling_params"] = {"max_tokens": 1, "prompt_logprobs": 1}
    assert post(port, GENERATE_PATH, body)[0] == 500


def post(port: int, path: str, body: dict[str, Any]) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD_S)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


@pytest.mark.usefixtures("installed")
def test_an_existing_command_joins_with_one_argument(tmp_path: Path) -> None:
    model = tiny_model()
    settings = tiny_cluster_settings(model, tmp_path / "storage", mode=DEFAULT_MODE)
    with EngineCluster(settings, tmp_path) as cluster:
        ports = {role: claim_port() for role in ("prefill", "decode")}
        for role, port in ports.items():
            name = f"{role}-{socket.gethostname()}-{port}"
            command = existing_command(model, port) + transfer(role, cluster)
            process = ForkedProcess(name, ENGINE_ENTRY, command, tmp_path / f"{role}.log")
            cluster.supervisor.add(process)
        cluster.wait_for(*(process.name for process in cluster.supervisor.processes))
        origin = f"measured by engine prefill-{socket.gethostname()}-{ports['prefill']}"

        def measured() -> bool:
            status = cluster.service.status()
            return all(status[name]["origin"].startswith(origin) for name in ("alpha", "beta"))

        # The router has a thread of its own: an engine is registered before its rates are used.
        until(measured, "rates of the prefill engine", GUARD_S)
        status = cluster.service.status()
        assert min(status[name]["tokens"] for name in ("alpha", "beta")) > 1000
        first = cluster.ask(PROMPT, 20)
        assert len(first.token_ids) == 20
        stored = cluster.wait_stored((PROMPT + first.token_ids)[:-1])
        again = cluster.ask(PROMPT, 20)
        assert again.cached_tokens == 256
        assert again.token_ids == first.token_ids
        assert len(stored) == 4
        check_direct_requests_fail(ports["prefill"])
        alone = complete(f"http://127.0.0.1:{ports['decode']}", PROMPT, 20)
        assert alone.token_ids == first.token_ids
        assert cluster.ask(PROMPT, 20).token_ids == first.token_ids
    log = (tmp_path / "prefill.log").read_text(errors="replace")
    assert "added api_url=http://127.0.0.1:" in log
    assert "--scheduler-cls dualpath.vllm.quota_scheduler.QuotaScheduler" in log
