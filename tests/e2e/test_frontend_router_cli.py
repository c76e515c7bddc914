"""`dualpath router` as a user starts it: errors at start, its log, its shutdown."""

import json
import logging
import re
import signal
import socket
import threading
import urllib.error
import urllib.request

import pytest

pytest.importorskip("vllm")

from tests.e2e.plain_engine import until
from tests.guard import GUARD_S

from dualpath.cli.main import main
from dualpath.launch.fork_server import ForkedProcess
from dualpath.router.settings import RouterSettings
from dualpath.vllm.front_end_settings import FrontEndSettings
from dualpath.vllm.router_process import client_arguments
from dualpath_lab.models.random_models import make_tiny_model


@pytest.fixture(scope="module")
def model():
    return str(make_tiny_model("qwen2"))


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


def refused(capfd, *arguments):
    """Run the command in this process; return its error line."""
    assert main(["router", *arguments]) == 2
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("dualpath: ")
    return line


def test_a_port_in_use_is_named(model, capfd, taken_port):
    line = refused(capfd, model, "--port", taken_port, "--control-port", "0")
    assert f"127.0.0.1:{taken_port}" in line
    assert "--port" in line


def test_a_taken_control_port_is_named(model, capfd, taken_port):
    assert taken_port in refused(capfd, model, "--port", "0", "--control-port", taken_port)


def test_a_model_that_is_not_there_is_named(capfd, tmp_path):
    line = refused(capfd, str(tmp_path / "nothing"), "--port", "0", "--control-port", "0")
    assert str(tmp_path / "nothing") in line
    assert "config.json" in line


@pytest.mark.parametrize(
    ("arguments", "captured"),
    [
        (["--port", "70000"], "70000|65535"),
        (["--max-model-len", "-5"], "--max-model-len is -5"),
        (["--block-tokens", "0"], "--block-tokens is 0"),
        (["--alpha-tokens", "0"], "--alpha-tokens is 0"),
        (["--read-deadline-s", "-1"], "--read-deadline-s is -1"),
        (["--vllm-args", "--no-such-flag"], "no-such-flag"),
        (["--vllm-args", "--enable-auto-tool-choice"], "tool-call-parser"),
        (["--vllm-args", "--data-parallel-size", "2"], "no engine of its own"),
        (
            ["--vllm-args", "--enable-auto-tool-choice", "--tool-call-parser", "none-such"],
            "none-such",
        ),
    ],
)
def test_wrong_settings_are_named(model, capfd, arguments, captured):
    line = refused(capfd, model, "--control-port", "0", *arguments)
    assert re.search(captured, line)


def test_a_misspelt_flag_of_our_own_is_refused(model, capfd):
    with pytest.raises(SystemExit) as exit_:
        main(["router", model, "--control-prt", "1"])
    assert exit_.value.code == 2
    assert "--control-prt" in capfd.readouterr().err


class Router:
    """A running `dualpath router` and its endpoint."""

    def __init__(self, folder, *arguments):
        self.process = ForkedProcess(
            "router", "dualpath.cli.main:main", ["router", *arguments], folder / "router.log"
        )
        captured = self.process.wait_for_line("engines register at", GUARD_S)
        (self.url,) = re.findall(r"http://[\d.]+:\d+", captured)

    def end(self, signal_number):
        self.process.send_signal(signal_number)
        try:
            return self.process.wait(GUARD_S)
        finally:
            self.process.kill()


def post(url, outcome):
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 4}).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        urllib.request.urlopen(request, timeout=GUARD_S)
    except urllib.error.HTTPError as error:
        outcome.append((error.code, json.loads(error.read())["error"]["message"]))


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=GUARD_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_a_router_without_engines_reports_it_and_ends_cleanly(model, tmp_path):
    router = Router(
        tmp_path, model, "--port", "0", "--control-port", "0", "--served-model-names", "tiny",
        "--mode", "oracle",
    )  # fmt: skip
    try:
        assert get(f"{router.url}/v1/models")[0] == 200
        status, body = get(f"{router.url}/health")
        assert status == 503
        assert "no live prefill and no live decode engine" in json.loads(body)["reason"]
        assert json.loads(get(f"{router.url}/dualpath/v1/status")[1])["engines"] == []
        assert b"dualpath:engines_up" in get(f"{router.url}/metrics")[1]
        outcome: list[tuple[int, str]] = []
        waiting = threading.Thread(target=post, args=(router.url, outcome))
        waiting.start()
        until(lambda: json.loads(get(f"{router.url}/dualpath/v1/status")[1])["waiting"], "a wait")
    finally:
        code = router.end(signal.SIGINT)  # SIGTERM would let the request wait for engines
    waiting.join(GUARD_S)
    assert code == 0
    assert [status for status, _ in outcome] == [503]
    assert "shutting down" in outcome[0][1]


def test_what_a_router_logs_has_time_and_level_however_it_was_started(model, monkeypatch, capfd):
    """vLLM has no handlers before its arguments are parsed; a process that forks had some."""
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [])
    # Another test of this process may have parsed the same: vLLM would find nothing to do.
    monkeypatch.setattr("vllm.logger._last_configured_logging_config", None)
    client_arguments(RouterSettings(), FrontEndSettings(model=model))
    logging.getLogger("dualpath.router.control").info("engine pe-0 joined")
    captured = capfd.readouterr()
    assert re.search(
        r"INFO \d\d-\d\d \d\d:\d\d:\d\d .*engine pe-0 joined", captured.out + captured.err
    )
