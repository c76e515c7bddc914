"""`dualpath emulate`: from arguments to settings, and arguments that are refused with one line."""

import argparse
from pathlib import Path

import pytest

from dualpath.cli.main import main
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import DEFAULT_MODE, Mode
from dualpath_lab.cli import emulate
from dualpath_lab.emulated.settings import Verify


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    emulate.add_parser(parser.add_subparsers())
    return parser.parse_args(["emulate", *arguments])


def test_a_catalog_model_gives_geometry_costs_and_context() -> None:
    arguments = ("prefill", "--model", "qwen2.5-32b", "--storage", "kv", "--engine-id", "pe-7")
    settings = emulate.emulated_settings(parsed(*arguments, "--verify", "sampled"))
    assert settings.engine.role is Role.PREFILL
    assert settings.engine.engine_id == "pe-7"
    assert settings.geometry.layers == settings.costs.layers == 64
    assert settings.geometry.bytes_per_token == settings.costs.kv_bytes_per_token
    assert settings.max_model_len == settings.costs.context_limit_tokens
    assert settings.verify is Verify.SAMPLED
    assert settings.layer_regions == 2


def test_the_kv_may_be_smaller_than_the_models() -> None:
    settings = emulate.emulated_settings(
        parsed(
            *("decode", "--model", "qwen2.5-32b", "--storage", "kv", "--layers", "4"),
            *("--kv-bytes-per-token", "1024", "--block-tokens", "16", "--mode", "basic"),
            *(
                "--hbm-bytes",
                "8MiB",
                "--buffer-bytes",
                "4MiB",
                "--snic-bytes-per-s",
                "50MB",
                "--speedup",
                "20",
            ),
        )
    )
    assert settings.geometry.full_block_bytes == 16 * 1024
    assert settings.layer_regions == 4
    assert settings.engine.mode is Mode.BASIC
    assert settings.engine.snic_bytes_per_s == 50e6
    assert settings.hbm_bytes == 8 << 20
    assert settings.engine.buffer_bytes == 4 << 20
    assert settings.speedup == 20.0
    assert settings.verify is None


def test_layers_may_have_parts_and_be_unequal() -> None:
    given = ("decode", "--model", "qwen2.5-32b", "--storage", "kv", "--layer-parts", "16+8*2,64")
    settings = emulate.emulated_settings(parsed(*given, "--block-tokens", "4"))
    assert settings.geometry.layer_parts == ((64, 32), (64, 32), (256,))
    with pytest.raises(ConfigError, match="defines number and size of the layers"):
        emulate.emulated_settings(parsed(*given, "--layers", "3"))


def test_ranks_of_emulated_engines_cannot_share_their_loads() -> None:
    given = ("prefill", "--model", "qwen2.5-32b", "--storage", "kv", "--share-loads")
    with pytest.raises(ConfigError, match="share_loads"):
        emulate.emulated_settings(parsed(*given))


def test_a_cluster_has_one_router_and_its_engines_with_the_same_settings() -> None:
    arguments = ("cluster", "--model", "qwen2.5-32b", "--storage", "kv", "--port", "8000")
    more = ("--nodes", "2P4D", "--mode", "basic", "--block-tokens", "16", "--dram-bytes", "1GiB")
    settings, commands = emulate.cluster_settings(parsed(*arguments, *more, "--alpha-tokens", "9"))
    assert (settings.prefill, settings.decode, settings.port) == (2, 4, 8000)
    assert settings.mode is Mode.BASIC
    router = emulate.router_settings(parsed(*commands.router(settings, 8000, 5711)[1:]))
    assert (router.alpha_tokens, router.mode, router.control_port) == (9, Mode.BASIC, 5711)
    where = {"host": "127.0.0.1", "router_host": "127.0.0.1", "named_as": None}
    line = commands.engine(settings, Role.DECODE, 3, 8003, 5711, **where)
    engine = emulate.emulated_settings(parsed(*line[1:]))
    assert engine.engine.role is Role.DECODE
    assert (engine.engine.engine_id, engine.port) == ("de-3", 8003)
    assert (engine.engine.dram_bytes, engine.geometry.block_tokens) == (1 << 30, 16)


@pytest.mark.parametrize(
    "more", [("--front-ends", "2"), ("--ssl-certfile", "c", "--ssl-keyfile", "k"), ("--nodes", "2")]
)
def test_what_a_cluster_does_not_start_is_refused(more: tuple[str, ...]) -> None:
    arguments = ("cluster", "--model", "qwen2.5-32b", "--storage", "kv")
    with pytest.raises(ConfigError):
        emulate.cluster_settings(parsed(*arguments, *more))


def test_only_a_cluster_has_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate", "router", "--nodes", "2P4D"]) == 2
    assert "leave it out with router" in capsys.readouterr().err


def test_a_router_listens_where_engines_connect() -> None:
    arguments = ("router", "--control-port", "5711", "--alpha-tokens", "9")
    settings = emulate.router_settings(parsed(*arguments))
    assert (settings.control_host, settings.control_port) == ("127.0.0.1", 5711)
    assert settings.alpha_tokens == 9
    assert settings.mode is DEFAULT_MODE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prefill", "--model", "qwen2.5-32b"], "--storage is missing"),
        (["decode", "--storage", "kv"], "--model is missing"),
        (
            ["decode", "--model", "ds-27b", "--storage", "kv", "--router", "127.0.0.1:5700"],
            "use the form tcp://host:port",
        ),
        (["router", "--port", "-1"], "port"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["emulate", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
