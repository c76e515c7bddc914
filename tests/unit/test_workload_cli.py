"""The commands ``dualpath replay`` and ``dualpath report``."""

import argparse
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from tests.unit.workload_server import FakeServer, served

from dualpath.cli import replay as replay_command
from dualpath.cli import report as report_command
from dualpath.core.errors import ConfigError, TraceError
from dualpath.workload.replay.result import read_result


def command(module: ModuleType, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_parser(parser.add_subparsers())
    code: int = module.run(parser.parse_args(arguments))
    return code


def test_the_commands_replay_report_and_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace = tmp_path / "t.jsonl"
    trace.write_text("[[8, 5], [4, 2]]\nbroken\n[[8, 5]]\n")
    out, page = str(tmp_path / "run.json"), str(tmp_path / "run.html")

    with served(FakeServer()) as endpoint:
        replay_code = command(
            replay_command,
            *("replay", str(trace), "--endpoint", f"{endpoint}/v1", "--agents", "3"),
            *("--skip-broken", "--json", out, "--html", page, "--label", "first"),
        )
    report_code = command(report_command, "report", out, out, "--html", page)

    assert (replay_code, report_code) == (0, 0)
    result = read_result(out)
    assert (result.summary.turns, result.setting.trace_format) == (5, "rounds")
    assert result.setting.broken_lines == 1
    printed = capsys.readouterr()
    assert "first #2" in printed.out
    assert "skipped: " in printed.err
    assert "turns 5/5" in printed.err
    assert "<svg" in Path(page).read_text()


def test_the_replay_command_shows_failed_turns_by_its_exit_code(tmp_path: Path):
    trace = tmp_path / "t.jsonl"
    trace.write_text("[[8, 5]]\n")

    async def refuse(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=503)

    with served(FakeServer(fault=refuse)) as endpoint:
        assert command(replay_command, "replay", str(trace), "--endpoint", endpoint) == 1


@pytest.mark.parametrize(
    ("line", "more", "error", "message"),
    [
        ("broken", [], TraceError, "has no readable JSON|line 1"),
        (
            '{"messages": [{"role": "user"}, {"role": "assistant"}]}',
            [],
            ConfigError,
            "is a text trace.*--tokenizer",
        ),
    ],
)
def test_the_replay_command_refuses_before_it_connects(
    tmp_path: Path, line: str, more: list[str], error: type[Exception], message: str
):
    trace = tmp_path / "t.jsonl"
    trace.write_text(line + "\n")

    with pytest.raises(error, match=message):
        command(replay_command, "replay", str(trace), "--endpoint", "http://127.0.0.1:9", *more)
