"""What a person types wrongly is one line that names the flag, what was typed and a remedy.

Commands and flags are found by introspection, so that new ones are tried as well.
"""

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.guard import GUARD_S
from tests.typed_commands import Command, all_commands

from dualpath.cli import main as entry
from dualpath.cli.main import main
from dualpath.cli.settings import SECTIONS, flag_settings
from dualpath.core.errors import ConfigError
from dualpath.core.settings import Declared, declared

COMMANDS = all_commands()
NAMES = [command.name for command in COMMANDS]

each_command = pytest.mark.parametrize("command", COMMANDS, ids=NAMES)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message of a refused command."""
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("dualpath: ")
    assert len(lines[0]) < 1000  # a path may have 300 characters, and stand there twice
    return lines[0]


# ---------------------------------------------------------------------------------- unknown flags


@each_command
def test_the_nearest_flag_is_suggested_for_an_unknown_one(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [flag for flag in command.parser._option_string_actions if flag.startswith("--")]
    longest = max(flags, key=len)
    with pytest.raises(SystemExit) as refused:
        entry._refuse_unknown(_own_kind(command), [f"{longest}s", "7"])
    assert refused.value.code == 2
    message = one_line(capsys)
    assert message.startswith(f"dualpath: {longest}s is unknown; did you mean {longest}?")
    assert f"`dualpath {command.name} --help`" in message


def _own_kind(command: Command) -> entry.Parser:
    parser = entry.Parser(prog=command.parser.prog, add_help=False)
    parser._option_string_actions.update(command.parser._option_string_actions)
    return parser


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serv"], "argument SUBCOMMAND: 'serv' is unknown; did you mean serve?"),
        (["storage", "prn", "kv"], "argument ACTION: 'prn' is unknown; did you mean pin?"),
        (["serve", "m", "--storrage", "kv"], "--storrage is unknown; did you mean --storage?"),
        (["storage", "du", "kv", "--by", "name"], "'name' is unknown; did you mean namespace?"),
        (["table1", "deepseek"], "'deepseek' is one more than `dualpath table1` takes"),
        (["lab", "run", "--agents", "3"], "--agents is unknown; did you mean --agents-"),
        (["storage", "du"], "the following arguments are required: STORAGE"),
    ],
)
def test_a_wrong_word_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(words)
    assert refused.value.code == 2
    assert message in one_line(capsys)


@each_command
def test_helps_name_settings_by_their_flags(command: Command) -> None:
    for action in command.parser._actions:
        assert not re.search(r"\{[a-z_]+\}", action.help or ""), action.option_strings


# ----------------------------------------------------------------------------------------- paths

#: How each command with a path is typed: its words, where S is a storage and M a model's folder,
#: which do not exist or are empty unless they are the path that is tried.
TYPED: dict[str, str] = {
    "serve": "M --storage S --dry-run --dram-bytes 1GB",
    "scheduler": "",
    "roles": "--endpoint http://127.0.0.1:9",
    "weights": "update --label step-1 --endpoint http://127.0.0.1:9",
    "replay": "T --endpoint http://127.0.0.1:9",
    "record": "--endpoint http://127.0.0.1:9 --out S",
    "report": "T",
    "config check": "",
    "storage du": "S",
    "storage verify": "S",
    "storage pin": "S",
    "storage rm": "S --unused-for 7d",
    "storage janitor": "S --storage-ttl 7d",
    "doctor": "--skip vllm,nixl --storage-bytes 1MiB",
    "qos": "",
    "demo": "",
    "emulate": "prefill --engine-id e --router tcp://127.0.0.1:9 --api-url http://127.0.0.1:9 "
    "--storage S --model smollm2-135m --dram-bytes 100MB",
    "emulate ssl_certfile": "prefill --engine-id e --router tcp://127.0.0.1:9 "
    "--api-url https://127.0.0.1:9 --storage S --model smollm2-135m --dram-bytes 100MB",
    "emulate event_log": "router",
    "emulate standby_lock": "router",
    "model": "tiny-qwen2",
    "lab up": "",
    "lab status": "",
    "lab run": "",
    "lab bench jct": "",
    "lab bench online": "",
    "lab bench simulator": "",
    "lab bench isolation": "",
    "lab bench dram": "",
    "lab bench sealed": "",
    "lab bench roles": "",
    "lab bench data-plane": "",
    "chaos fuzz": "blocks --count 1",
    "chaos run": "",
    "chaos simulate": "--seeds 1",
    "simulate": "--trace 32k --cluster paper-27b --model smollm2-135m",
    "eval": "fig7",
    "plan": "--trace 32k --total-nodes 3 --cluster paper-27b --model smollm2-135m",
    "bounds": "",
    "table1": "",
    "workingset": "",
    "profile": "M --out S",
}
#: Commands that need a minute before they look at a path, and flags that they do not look at
#: themselves, or that are no paths to this machine.
NOT_TYPED = {"router", "frontend", "gpu-check"}
NOT_LOOKED_AT = {
    *(("scheduler", "lora_modules"), ("emulate", "lora_modules"), ("eval", "traces")),
    *(("chaos fuzz", "path"), ("chaos run", "storage"), ("chaos run", "model")),
    *((f"lab bench {name}", key) for name in ("jct", "online", "simulator", "dram", "sealed")
      for key in ("vllm", "model", "trace_dir", "storage", "config")),
    *(("lab run", key) for key in ("vllm", "model", "trace_dir", "storage", "config")),
    *(("lab bench roles", "model"), ("lab bench data-plane", "storage"), ("lab up", "storage")),
    *(("demo", "trace"), ("replay", "tokenizer"), ("emulate", "profile")),
    # Read only with a lease in etcd over TLS, or when an engine has an https:// address.
    *((name, f"{key}_file") for name in ("scheduler", "emulate")
      for key in ("lease_ca", "lease_cert", "lease_key", "lease_password", "engine_ca")),
    # A finding of the doctor, and models that vLLM looks for.
    *(("doctor", "storage"), ("profile", "model"), ("weights", "reload")),
}  # fmt: skip
#: Paths that no user may look at, by the error that the operating system gives.
UNUSABLE = {
    errno.ENAMETOOLONG: lambda at: str(at / ("n" * 300)),
    errno.ELOOP: lambda at: str(at / "loop" / "x"),
    errno.ENOTDIR: lambda at: str(at / "file" / "x"),
}


def _cases() -> list[Any]:
    found = []
    for command in COMMANDS:
        for number, action in enumerate(command.path_arguments()):
            if command.name in NOT_TYPED or (command.name, action.dest) in NOT_LOOKED_AT:
                continue
            kind = list(UNUSABLE)[number % len(UNUSABLE)]
            flag = action.option_strings[0] if action.option_strings else action.metavar
            found.append(pytest.param(command.name, action, kind, id=f"{command.name} {flag}"))
    return found


@pytest.mark.parametrize(("name", "action", "kind"), _cases())
def test_a_path_that_may_not_be_looked_at_is_one_line(
    name: str,
    action: Any,
    kind: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"num_attention_heads": 4}')
    (tmp_path / "trace.jsonl").write_text('{"session_id": "x", "rounds": [[9, 5]]}\n')
    monkeypatch.chdir(tmp_path)
    bad = UNUSABLE[kind](tmp_path)
    known = {"M": str(tmp_path / "model"), "S": str(tmp_path / "kv"), "T": "trace.jsonl"}
    typed = TYPED.get(f"{name} {action.dest}", TYPED[name])
    words = [known.get(word, word) for word in typed.split()]
    if not action.option_strings:
        words[:1] = [bad]
    else:
        flag = action.option_strings[0]
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
        words += [flag, f"a={bad}" if action.dest == "lora_modules" else bad]
    before = sorted(tmp_path.rglob("*"))
    assert main([*name.split(), *words]) == 2
    if name == "emulate":  # an engine creates its storage
        shutil.rmtree(tmp_path / "kv", ignore_errors=True)
    message = one_line(capsys)
    assert os.strerror(kind) in message or "there is no" in message
    assert sorted(tmp_path.rglob("*")) == before


def test_every_command_with_a_path_is_typed() -> None:
    with_paths = {command.name for command in COMMANDS if list(command.path_arguments())}
    assert with_paths - NOT_TYPED <= set(TYPED)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stand-in for the module of `dualpath replay`; its `run` is set by the test."""
    module: Any = ModuleType("dualpath.cli.replay")

    def add_parser(subparsers: Any) -> None:
        subparsers.add_parser("replay").add_argument("--trace")

    module.add_parser = add_parser
    monkeypatch.setitem(sys.modules, "dualpath.cli.replay", module)
    made: ModuleType = module
    return made


@pytest.mark.parametrize(
    "number",
    [errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EIO, errno.ESTALE],
    ids=errno.errorcode.get,
)
def test_an_error_of_a_path_names_its_flag(
    command: Any, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: Any) -> int:
        raise OSError(number, os.strerror(number), f"{args.trace}/0.jsonl")

    command.run = run
    assert main(["replay", "--trace", "traces"]) == 2
    assert one_line(capsys) == (
        f"dualpath: --trace traces/0.jsonl: cannot be used ({os.strerror(number)}); check the path "
        "and its permissions"
    )


def test_an_error_without_a_path_is_a_defect(
    command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: Any) -> int:
        raise OSError(errno.EBADF, "Bad file descriptor")

    command.run = run
    assert main(["replay"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_nul_character_is_refused_in_arguments_and_settings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["storage", "du", "a\0b"]) == 2
    assert "has a NUL character" in one_line(capsys)
    file = tmp_path / "cluster.toml"
    file.write_text('[cluster]\nmodel = "m"\nstorage = "a\\u0000b"\n')
    assert main(["serve", "--config", str(file), "--dry-run"]) == 2
    assert "storage has a NUL character" in one_line(capsys)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["chaos", "simulate", "--json", "none/x.json"], "--json"),
        (["simulate", "--trace", "32k", "--json", "none/x.json"], "--json"),
        (["report", "run.json", "--html", "none/x.html"], "--html"),
        (["replay", "t.jsonl", "--endpoint", "http://127.0.0.1:9", "--json", "file/x"], "--json"),
        (["chaos", "run", "--out", "file/x"], "--out"),
    ],
)
def test_an_output_is_checked_before_a_long_run(
    words: list[str],
    flag: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert one_line(capsys).startswith(f"dualpath: {flag} {words[-1]}: cannot be written (")


# ------------------------------------------------------------------------------ numbers with units

NUMBERS = [
    (section, field)
    for section in SECTIONS
    for field in declared(SECTIONS[section])
    if field.is_number and not field.choices
]


@pytest.mark.parametrize(
    "field", [pytest.param(field, id=f"{section} {field.name}") for section, field in NUMBERS]
)
def test_a_value_that_is_no_number_names_what_is_expected(field: Declared) -> None:
    with pytest.raises(ConfigError) as refused:
        field.parse("1GX")
    message = str(refused.value)
    assert message.startswith(f"{field.name} is '1GX'; give ")
    assert "Expected" not in message


@pytest.mark.parametrize(
    "field",
    [pytest.param(field, id=f"{section} {field.name}") for section, field in NUMBERS
     if field.is_time],
)  # fmt: skip
def test_every_time_may_have_a_unit(field: Declared) -> None:
    value = field.parse("2m")
    assert value == ((120.0,) if field.is_list else 120.0)
    assert field.parse("1.5h") == ((5400.0,) if field.is_list else 5400.0)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("500ms", 0.5), ("12h", 43200), ("7d", 604800)]
)
def test_a_time_is_the_same_for_settings_and_for_storage_rm(text: str, seconds: float) -> None:
    from dualpath.cli.storage import parse_number

    assert parse_number("--unused-for", "unused_for_s", text) == seconds


# ------------------------------------------------------------------------------------- log levels


@each_command
def test_every_command_takes_a_log_level(command: Command) -> None:
    entry._add_log_level(command.parser)
    assert "--log-level" in command.parser._option_string_actions


def test_the_level_reaches_this_process_and_those_that_it_starts(
    command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import logging

    monkeypatch.setenv("DUALPATH_LOG_LEVEL", "error")
    seen: list[object] = []

    def run(args: Any) -> int:
        level = logging.getLogger("dualpath").level
        seen.append((os.environ["DUALPATH_LOG_LEVEL"], level))
        return 0

    command.run = run
    assert main(["replay"]) == 0
    assert main(["replay", "--log-level", "debug"]) == 0
    assert seen == [("error", logging.ERROR), ("debug", logging.DEBUG)]
    monkeypatch.setenv("DUALPATH_LOG_LEVEL", "loud")
    assert main(["replay"]) == 2
    assert "DUALPATH_LOG_LEVEL is 'loud'" in one_line(capsys)


# -------------------------------------------------------------------------------- standard output


def _run(arguments: list[str], **more: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "dualpath.cli.main", *arguments],
        **{
            "env": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "timeout": GUARD_S,
            **more,
        },
    )


#: One that prints by print(), one by rich, and a help, all with characters that are not ASCII.
_PRINTING = [
    ["serve", "µ", "--storage", "kv", "--port", "0", "--dry-run"],
    ["table1"],
    ["bounds", "--help"],
]


@pytest.mark.parametrize("arguments", _PRINTING, ids=" ".join)
def test_an_encoding_without_a_character_prints_a_replacement(arguments: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = _run(arguments, env={**environment, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?" in done.stdout


@pytest.mark.parametrize("arguments", _PRINTING[:2], ids=" ".join)
def test_a_reader_that_has_gone_ends_the_command_silently(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = _run(arguments, stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("arguments", _PRINTING[:2], ids=" ".join)
def test_a_full_disk_at_standard_output_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = _run(arguments, stdout=full)
    assert done.returncode == 2
    assert done.stderr == (
        b"dualpath: standard output cannot be written: No space left on device\n"
    )


# ------------------------------------------------------------------------------------------- home


def test_a_path_of_a_file_or_variable_may_begin_with_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import argparse

    from dualpath.launch.settings import LocalClusterSettings

    monkeypatch.setenv("HOME", str(tmp_path))
    args = argparse.Namespace(model="~/model", storage="~/kv", log_dir="~/logs")
    settings = flag_settings(args, LocalClusterSettings, positional=("model",))
    assert settings.storage == str(tmp_path / "kv")
    assert settings.log_dir == str(tmp_path / "logs")
