"""A vLLM command line is completed for a DualPath engine; explicit arguments are not changed."""

import logging
import os
import socket
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.engine.settings import EngineSettings
from dualpath.vllm import engine_arguments
from dualpath.vllm.engine_arguments import (
    GUARD_CLASS,
    SCHEDULER_CLASS,
    SHUTDOWN_TIMEOUT_S,
    WORKER_CLASS,
    engine_settings,
)

EXTRA = {"role": "prefill", "router": "tcp://127.0.0.1:5700", "storage": "kv"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("DUALPATH_ENGINE_MODE", "DUALPATH_ENGINE_ROUTER"):
        monkeypatch.delenv(name, raising=False)


def typed(extra=EXTRA, connector="DualPathConnector", **arguments):
    """Parse a command line of only `arguments` with vLLM's parser."""
    transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=dict(extra))
    unset = {
        "enable_scale_out": False,
        "prefix_caching_hash_algo": "sha256",
        "enable_prefix_caching": None,
        "async_scheduling": None,
        "block_size": None,
        "shutdown_timeout": 0,
        "scheduler_cls": None,
        "worker_cls": "auto",
        "middleware": [],
    }
    return Namespace(
        **{"kv_transfer_config": transfer, "host": None, "port": 8001} | unset | arguments
    )


def settings_of(args):
    return engine_settings(args.kv_transfer_config.kv_connector_extra_config, {})


def test_a_prefill_engine_gets_its_arguments():
    args = typed()
    added = engine_arguments.complete(args)
    assert args.enable_scale_out is True
    assert args.enable_prefix_caching is args.async_scheduling is False
    assert args.prefix_caching_hash_algo == "sha256_cbor"
    assert (args.scheduler_cls, args.worker_cls) == (SCHEDULER_CLASS, WORKER_CLASS)
    assert (args.block_size, args.shutdown_timeout) == (64, SHUTDOWN_TIMEOUT_S)
    assert f"--worker-cls {WORKER_CLASS}" in added


def test_a_decode_engine_uses_vllms_classes():
    args = typed(EXTRA | {"role": "decode"})
    engine_arguments.complete(args)
    assert (args.scheduler_cls, args.worker_cls) == (None, "auto")
    assert args.enable_scale_out is True


@pytest.mark.parametrize(
    ("extra", "worker"), [({"mode": "basic"}, "auto"), ({"layer_buffers": 0}, WORKER_CLASS)]
)
def test_without_layer_buffers_the_worker_is_ours_if_it_times_passes(extra, worker):
    args = typed(EXTRA | extra)
    engine_arguments.complete(args)
    assert args.worker_cls == worker
    assert args.scheduler_cls == SCHEDULER_CLASS
    assert settings_of(args).layer_buffers == 0


def test_explicit_arguments_are_not_overridden():
    args = typed(enable_prefix_caching=True, block_size=16, scheduler_cls="mine")
    engine_arguments.complete(args)
    assert (args.enable_prefix_caching, args.block_size, args.scheduler_cls) == (True, 16, "mine")


def test_the_guard_is_outside_of_typed_middleware():
    args = typed(middleware=["mine.Middleware"])
    engine_arguments.complete(args)
    assert args.middleware == ["mine.Middleware", GUARD_CLASS]


@pytest.mark.parametrize("other", [{"grpc": True}, {"grpc_port": 50051}, {"headless": True}])
def test_a_server_without_the_guard_is_refused(other, monkeypatch):
    harmless = {"grpc": False, "grpc_port": None, "headless": False}
    assert engine_arguments.complete(typed(**harmless))
    with pytest.raises(ConfigError, match="which runs the guard middleware"):
        engine_arguments.complete(typed(**harmless | other))
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ConfigError, match="VLLM_USE_RUST_FRONTEND=1"):
        engine_arguments.complete(typed())


@pytest.mark.parametrize(
    "own", [{"data_parallel_rank": 1}, {"data_parallel_external_lb": True}, {}]
)
def test_data_parallel_ranks_may_share_a_server_or_have_one_each(own):
    assert engine_arguments.complete(typed(data_parallel_size=2, **own))


def test_kv_memory_in_bytes_overrides_the_variable_of_vllms_cpu_build(monkeypatch, caplog):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    engine_arguments.ignore_kv_space_variable(None)
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "40"
    engine_arguments.complete(typed(kv_cache_memory_bytes=1 << 30))
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    assert "VLLM_CPU_KVCACHE_SPACE=40 (GiB) of the environment is ignored" in caplog.text


def test_a_log_level_reaches_engines_whatever_vllms_level_is(monkeypatch, capsys):
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("dualpath")
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.INFO)  # as vLLM sets it
    monkeypatch.setattr(theirs, "handlers", [handler])
    monkeypatch.setattr(theirs, "level", logging.INFO)
    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(ours, name, getattr(ours, name))
    monkeypatch.setenv("DUALPATH_LOG_LEVEL", "debug")
    engine_arguments.join_vllm_logging()
    logging.getLogger("dualpath.engine").debug("a detail")
    assert "a detail" in capsys.readouterr().err
    assert handler.level == logging.INFO
    monkeypatch.setenv("DUALPATH_LOG_LEVEL", "error")
    engine_arguments.join_vllm_logging()
    logging.getLogger("dualpath.engine").warning("a warning")
    assert capsys.readouterr().err == ""


def test_other_servers_are_left_alone():
    for args in (typed(connector="NixlConnector"), Namespace(), typed(connector=None)):
        before = dict(vars(args))
        assert engine_arguments.complete(args) == []
        assert vars(args) == before


def test_completing_arguments_twice_adds_nothing():
    args = typed()
    assert engine_arguments.complete(args)
    assert engine_arguments.complete(args) == []


def test_the_name_is_stable_across_restarts_and_the_url_is_reachable():
    args = typed()
    engine_arguments.complete(args)
    settings = settings_of(args)
    assert settings.engine_id == f"prefill-{socket.gethostname()}-8001"
    # A router on this machine is reached over the loopback address.
    assert settings.api_url == "http://127.0.0.1:8001"


@pytest.mark.parametrize(
    ("host", "url"), [("10.1.2.3", "http://10.1.2.3:8001"), ("fd00::1", "http://[fd00::1]:8001")]
)
def test_an_explicit_host_is_in_the_url(host, url):
    args = typed(host=host)
    engine_arguments.complete(args)
    assert settings_of(args).api_url == url


def test_an_engine_with_a_certificate_is_reached_over_https():
    args = typed(ssl_certfile="c.pem", ssl_keyfile="k.pem")
    engine_arguments.complete(args)
    assert settings_of(args).api_url == "https://127.0.0.1:8001"
    args = typed(EXTRA | {"api_url": "http://gateway:1"}, ssl_certfile="c.pem")
    with pytest.raises(ConfigError, match=r"api_url is 'http://gateway:1'; write https://"):
        engine_arguments.complete(args)


def test_values_given_elsewhere_have_no_defaults(monkeypatch, tmp_path):
    config = tmp_path / "c.toml"
    config.write_text('[engine]\napi_url = "http://gateway:1"\n[cluster]\nprefill = 2\n')
    monkeypatch.setenv("DUALPATH_ENGINE_ENGINE_ID", "pe-7")
    args = typed(EXTRA | {"config": str(config)})
    engine_arguments.complete(args)
    extra = args.kv_transfer_config.kv_connector_extra_config
    assert not {"api_url", "engine_id"} & set(extra)
    settings = engine_settings(extra, {"DUALPATH_ENGINE_ENGINE_ID": "pe-7"})
    assert (settings.api_url, settings.engine_id) == ("http://gateway:1", "pe-7")


@pytest.mark.parametrize(
    ("extra", "port", "message"),
    [
        ({"rolle": "prefill"}, 8001, "rolle"),
        ({"router": "nowhere"}, 8001, "the router 'nowhere' cannot be reached"),
        ({"config": "none.toml"}, 8001, "none.toml"),
        ({}, 0, "give --port"),
    ],
)
def test_invalid_settings_are_refused_at_start(extra, port, message):
    with pytest.raises(ConfigError, match=message):
        engine_arguments.complete(typed(EXTRA | extra, port=port))


def test_the_environment_of_an_engine_is_checked():
    with pytest.raises(ConfigError, match="did you mean DUALPATH_ENGINE_STORAGE"):
        engine_settings(EXTRA, {"DUALPATH_ENGINE_STORAG": "kv"})


# ------------------------------------------------------------------ vLLM's side


def test_vllms_parser_has_these_arguments_with_these_defaults(monkeypatch):
    """Values equal to the defaults of vLLM's parser count as omitted."""
    pytest.importorskip("vllm")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from dualpath.vllm.engine_config import make_arg_parser

    parser = make_arg_parser(FlexibleArgumentParser())
    layerwise = EngineSettings(
        role=Role.PREFILL, engine_id="e", router="tcp://h:1", api_url="http://h:2", storage="kv"
    )
    for argument in engine_arguments.engine_arguments(layerwise):
        assert parser.get_default(argument.name) == argument.unset, argument.name
        namespace = parser.parse_args(argument.typed.split())
        assert getattr(namespace, argument.name) == argument.value, argument.name


def test_every_hook_is_found_in_this_vllm():
    pytest.importorskip("vllm")
    from dualpath.vllm import hooks

    assert hooks.missing() == []


def test_a_missing_hook_is_named(monkeypatch):
    from dualpath.vllm import hooks

    def gone():
        raise AttributeError("moved")

    monkeypatch.setattr(hooks, "HOOKS", (("there", lambda: True), ("moved", gone)))
    assert hooks.missing() == ["moved"]


def test_vllms_own_function_runs_on_the_completed_arguments():
    class Arguments:
        @classmethod
        def from_cli_args(cls, args):
            return cls, args.scheduler_cls

    class Derived(Arguments):
        pass

    engine_arguments._wrap(Arguments)
    assert Derived.from_cli_args(typed()) == (Derived, SCHEDULER_CLASS)
    assert Derived.from_cli_args(typed(connector=None)) == (Derived, None)
