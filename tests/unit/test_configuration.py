"""Settings from flags, environment and file: precedence, refusals, and secrets."""

import argparse
import enum
import json
import re
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.cli import frontend, router, serve
from dualpath.cli.main import main
from dualpath.cli.settings import SECTIONS, add_settings, flag_settings, outer_layers
from dualpath.core.errors import ConfigError
from dualpath.core.settings import (
    HIDDEN,
    OTHER_VARIABLES,
    Given,
    Origin,
    Setting,
    Settings,
    arguments,
    build,
    declared,
    effective,
    from_environment,
    from_flag,
    from_tables,
    layered,
    variable,
)
from dualpath_lab.cli import emulate

ROOT = Path(__file__).parents[2]


class Colour(enum.StrEnum):
    RED = "red"


class Part(Settings, frozen=True, kw_only=True):
    name: Annotated[str, Setting("who")]
    count: Annotated[int, Setting("how many", ge=1)] = 1
    share: Annotated[float, Setting("of count")] = 0.5
    colour: Annotated[Colour | None, Setting("as seen")] = None
    names: Annotated[tuple[str, ...], Setting("more of them")] = ()
    api_key: Annotated[str, Setting("of the server")] = ""
    size_bytes: Annotated[int, Setting("of each", ge=0)] = 0
    extra: Annotated[dict[str, str], Setting("the rest")] = msgspec.field(default_factory=dict)
    loud: Annotated[bool, Setting("says so")] = False

    def check(self):
        super().check()
        if self.share > self.count:
            raise ConfigError(f"{{share}} is {self.share}; it must be at most {{count}}")


SCHEMA = {"part": Part}
FIELDS = {field.name: field for field in declared(Part)}


def flag(key, value):
    return from_flag("part", FIELDS[key], value, f"--{key}")


# ------------------------------------------------------------------ layers


@given(st.sets(st.sampled_from(list(Origin)), min_size=1))
def test_the_last_layer_that_has_a_value_wins(origins):
    order = list(Origin)
    layers = [
        [Given("part", "count", rank, origin, origin.value)] if origin in origins else []
        for rank, origin in enumerate(order)
    ]
    winner = layered(*layers)["part", "count"]
    assert winner.origin is order[max(order.index(origin) for origin in origins)]
    assert winner.value == order.index(winner.origin)


def test_every_source_has_the_same_keys():
    found = layered(
        from_tables(SCHEMA, {"part": {"name": "file", "colour": "red", "share": 1}}, "c.toml"),
        from_environment(SCHEMA, {"DUALPATH_PART_COUNT": "7", "OTHER": "x"}),
        [flag("names", "a, b")],
    )
    settings = build(Part, "part", found, {})
    assert settings == Part(name="file", count=7, share=1.0, colour=Colour.RED, names=("a", "b"))
    origins = {row.key: row.origin for row in effective(Part, "part", found)}
    assert origins == {
        "name": Origin.FILE,
        "count": Origin.ENVIRONMENT,
        "share": Origin.FILE,
        "colour": Origin.FILE,
        "names": Origin.FLAG,
        "api_key": Origin.DEFAULT,
        "size_bytes": Origin.DEFAULT,
        "extra": Origin.DEFAULT,
        "loud": Origin.DEFAULT,
    }


@pytest.mark.parametrize("none", ["none", "null"])
@pytest.mark.parametrize("names", ["a", '["a"]'])
def test_a_variable_has_lists_with_commas_or_as_json_and_a_word_for_none(names, none):
    variables = {"DUALPATH_PART_NAMES": names, "DUALPATH_PART_COLOUR": none}
    values = {g.key: g.value for g in from_environment(SCHEMA, variables)}
    assert values == {"names": ("a",), "colour": None}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("4_096", 4096),
        ("1e3", 1000),
        ("512MiB", 512 << 20),
        ("80GB", 80 * 10**9),
        ("1Gbit", 125 * 10**6),
        ("2k", 2000),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_bytes_may_be_written_with_a_unit(text, size):
    assert flag("size_bytes", text).value == size


texts = st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=6)
parts = st.builds(
    Part,
    name=texts,
    count=st.integers(1, 2**60),
    share=st.floats(-1, 1),
    colour=st.sampled_from([None, Colour.RED]),
    names=st.lists(texts.map(str.strip).filter(bool), max_size=3).map(tuple),
    size_bytes=st.integers(0, 2**50),
    extra=st.dictionaries(texts.map(str.strip).filter(bool), texts.map(str.strip), max_size=2),
    loud=st.booleans(),
)


@given(parts)
def test_a_command_line_built_from_settings_is_equivalent(settings):
    """Only what differs from the defaults is written; read back it gives equal settings."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_settings(parser, Part)
    written = arguments(settings)
    assert flag_settings(parser.parse_args(written), Part) == settings
    assert arguments(Part(name="n")) == ["--name", "n"]


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"prat": {}}, r"c\.toml: unknown section \[prat\]; did you mean part\?"),
        ({"part": {"cuont": 1}}, r"c\.toml \[part\] cuont: unknown key; did you mean count\?"),
        ({"part": {"count": 0}}, r"c\.toml \[part\] count is 0; it must be at least 1; correct it"),
        ({"part": {"count": "1"}}, r"count is '1'; give a whole number, without quotes"),
        ({"part": {"colour": "rde"}}, r"colour is 'rde'; it must be one of red; did you mean red"),
        ({"part": 3}, r"write \[part\] above it"),
    ],
)
def test_a_file_is_refused_by_place(tables, message):
    with pytest.raises(ConfigError, match=message):
        from_tables(SCHEMA, tables, "c.toml")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("DUALPATH_PRAT_COUNT", "1", r"is unknown; did you mean DUALPATH_PART_COUNT\?"),
        ("DUALPATH_PART_COUNT", "many", r"DUALPATH_PART_COUNT is 'many'; give a whole number"),
        ("DUALPATH_PART_NAMES", "[", "DUALPATH_PART_NAMES is '\\['"),
    ],
)
def test_a_variable_is_refused_by_name(name, text, message):
    with pytest.raises(ConfigError, match=message):
        from_environment(SCHEMA, {name: text})


def test_what_the_settings_refuse_themselves_names_its_origin():
    given = layered([flag("name", "n")], from_environment(SCHEMA, {"DUALPATH_PART_SHARE": "2"}))
    output = r"DUALPATH_PART_SHARE is 2\.0; it must be at most --count"
    with pytest.raises(ConfigError, match=output):
        build(Part, "part", given, {"count": "--count"})


def test_a_missing_key_is_requested_in_all_three_ways():
    with pytest.raises(ConfigError, match=r"--name is missing.*DUALPATH_PART_NAME.*\[part\]"):
        build(Part, "part", {}, {"name": "--name"})


def test_a_key_is_neither_printed_nor_quoted_in_a_refusal():
    rows = effective(Part, "part", layered([flag("api_key", "s3cret")]))
    assert {row.key: row.shown for row in rows}["api_key"] == HIDDEN
    with pytest.raises(ConfigError) as refused:
        from_tables(SCHEMA, {"part": {"api_key": ["s3cret"]}}, "c.toml")
    assert "s3cret" not in str(refused.value)


# ------------------------------------------------------------------ the real schema


def test_every_variable_named_in_the_code_is_known():
    """A variable unknown to the environment check would be refused by every command."""
    named = set()
    for file in (ROOT / "src").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        named |= set(re.findall(r"\"(DUALPATH_[A-Z_]+[A-Z])\"", text))
    settings = {
        variable(section, field.name)
        for section, kind in SECTIONS.items()
        for field in declared(kind)
    }
    assert named <= settings | OTHER_VARIABLES
    assert not settings & OTHER_VARIABLES


def parsed(command, *arguments):
    subparsers = argparse.ArgumentParser().add_subparsers()
    command.add_parser(subparsers)
    (parser,) = subparsers.choices.values()
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("command", "arguments", "places"),
    [
        (serve, ["m", "--storage", "kv"], {"MODEL", "--storage"}),
        (router, ["m", "--max-model-len", "9"], {"MODEL", "--max-model-len"}),
        (frontend, ["m", "--scheduler", "tcp://s:1"], {"MODEL", "--scheduler"}),
        (emulate, ["router"], set()),
        (emulate, ["frontend", "--scheduler", "tcp://s:1"], {"--scheduler"}),
        (
            emulate,
            ["decode", "--model", "ds-27b", "--storage", "k"],
            {"ROLE", "--model", "--storage"},
        ),
    ],
)
def test_omitted_settings_have_their_defaults(command, arguments, places, monkeypatch):
    for name in OTHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    layers = command.checked_layers(parsed(command, *arguments)).layers
    typed = {given.place for given in layers.values() if given.origin is Origin.FLAG}
    assert typed == places


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(
        '[cluster]\nmodel = "m"\nstorage = "kv"\nnodes = "2P1D"\nbuffer_bytes = 4096\n'
        "[router]\nengine_timeout_s = 9\n[engine]\nstaging_blocks = 8\n"
    )
    return "c.toml"


def test_serve_takes_flags_over_variables_over_the_file(file, monkeypatch):
    monkeypatch.setenv("DUALPATH_CLUSTER_NODES", "3P1D")
    monkeypatch.setenv("DUALPATH_CLUSTER_HBM_BYTES", "4MiB")
    settings = serve.cluster_settings(parsed(serve, "--config", file, "--hbm-bytes", "5MiB"))
    assert (settings.nodes, settings.hbm_bytes, settings.buffer_bytes) == ("3P1D", 5 << 20, 4096)
    assert (settings.model, settings.block_tokens) == ("m", 64)


def test_serve_passes_the_file_to_router_and_engines(file):
    from dualpath.core.cluster import Role
    from dualpath.launch.commands import engine_command, router_command
    from dualpath.vllm.engine_arguments import engine_settings

    settings = serve.cluster_settings(parsed(serve, "--config", file))
    command = router_command(settings, 8000, 5700)
    router_settings, _ = router.settings_of(parsed(router, *command[1:]))
    assert router_settings.engine_timeout_s == 9
    assert router_settings.control_port == 5700
    command = engine_command(settings, Role.PREFILL, 0, 8001, 5700)
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    engine = engine_settings(transfer["kv_connector_extra_config"], {})
    assert (engine.staging_blocks, engine.buffer_bytes, engine.engine_id) == (8, 4096, "pe-0")


@pytest.mark.parametrize(
    "name",
    ["DUALPATH_ENGINE_BUFFER_BYTES", "DUALPATH_ROUTER_CONTROL_PORT", "DUALPATH_ENDPOINT_PORT"],
)
def test_serve_refuses_what_its_own_commands_would_override(name, file, monkeypatch):
    monkeypatch.setenv(name, "5000")
    with pytest.raises(ConfigError, match=rf"{name} has no effect.*\[cluster\]"):
        serve.cluster_settings(parsed(serve, "--config", file))


def test_an_emulated_engine_is_described_by_a_file(tmp_path):
    config = tmp_path / "e.toml"
    config.write_text(
        '[engine]\nstorage = "kv"\nrouter = "tcp://10.0.0.1:5700"\nparallel_reads = 9\n'
        '[emulated]\nmodel = "qwen2.5-32b"\nverify = "full"\nspeedup = 2\n'
    )
    arguments = ("decode", "--config", str(config), "--speedup", "4")
    settings = emulate.emulated_settings(parsed(emulate, *arguments))
    assert settings.engine.router == "tcp://10.0.0.1:5700"
    assert settings.engine.parallel_reads == 9
    assert (settings.verify, settings.speedup) == ("full", 4.0)


# ------------------------------------------------------------------ dualpath config check


def test_config_check_shows_the_origin_of_every_key(file, capsys, monkeypatch):
    monkeypatch.setenv("DUALPATH_ROUTER_MAX_ATTEMPTS", "5")
    command = ["config", "check", "--config", file, "--json", "-"]
    assert main([*command, "serve", "--hbm-bytes", "1MiB"]) == 0
    rows = {(r["section"], r["key"]): r for r in json.loads(capsys.readouterr().out)}
    assert rows["cluster", "nodes"]["origin"] == "file"
    assert rows["cluster", "hbm_bytes"]["place"] == "--hbm-bytes"
    assert rows["cluster", "hbm_bytes"]["value"] == 1 << 20
    assert rows["router", "max_attempts"]["place"] == "DUALPATH_ROUTER_MAX_ATTEMPTS"
    assert rows["cluster", "mode"]["origin"] == "default"


def test_config_check_without_a_command_shows_every_section(file, capsys):
    assert main(["config", "check", "--config", file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("[")] == [f"[{name}]" for name in SECTIONS]
    (role,) = [line for line in lines if line.split()[0] == "role"]
    assert "required, not set" in role


def test_config_check_refuses_in_one_line(file, capsys, monkeypatch):
    monkeypatch.setenv("DUALPATH_CLUSTER_HBM_BYTES", "-4")
    assert main(["config", "check", "--config", file]) == 2
    assert "DUALPATH_CLUSTER_HBM_BYTES is -4; it must be at least 1; correct it" in (
        capsys.readouterr().err
    )
    assert main(["config", "check", "replay"]) == 2
    assert "serve, router, scheduler, frontend, emulate" in capsys.readouterr().err
    assert main(["config", "check", "--config", "none.toml"]) == 2
    assert "none.toml" in capsys.readouterr().err


def test_secrets_stay_out_of_config_check(capsys, monkeypatch):
    monkeypatch.setenv("DUALPATH_ROUTER_API_KEYS", '["s3cret"]')
    for form in ((), ("--json", "-")):
        assert main(["config", "check", *form]) == 0
        output = capsys.readouterr().out
        assert "s3cret" not in output
        assert HIDDEN in output


def test_the_file_of_the_documentation_is_accepted():
    page = (ROOT / "docs" / "how-to" / "configure.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    found = layered(from_tables(SECTIONS, tomllib.loads(example), "cluster.toml"))
    assert found["engine", "buffer_bytes"].value == 80_000_000_000
    sections = set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE))
    assert sections == set(SECTIONS)


def test_layers_outside_a_command_line_are_empty_by_default(monkeypatch):
    for name in OTHER_VARIABLES:
        monkeypatch.setenv(name, "set")
    assert outer_layers(None) == ([], [])
