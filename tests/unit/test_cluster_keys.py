"""What `dualpath serve` hands to its processes, and what it never writes on a command line."""

import json

import pytest

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.launch.commands import engine_command, router_command
from dualpath.launch.local_cluster import ClusterKeys
from dualpath.launch.settings import LocalClusterSettings


def settings(**changes) -> LocalClusterSettings:
    return LocalClusterSettings(model="m", storage="kv", **changes)


def test_router_and_engines_get_one_secret_and_one_key_of_the_engines():
    keys = ClusterKeys(settings(), {"VLLM_API_KEY": "of-the-clients"})
    router, engine = keys.router_environment(), keys.engine_environment()
    assert router["DUALPATH_CLUSTER_SECRET"] == engine["DUALPATH_CLUSTER_SECRET"]
    assert router["DUALPATH_ENGINE_API_KEY"] == engine["VLLM_API_KEY"] != "of-the-clients"
    # The router has the clients' key from the environment it inherits.
    assert "VLLM_API_KEY" not in router
    other = ClusterKeys(settings(), {}).router_environment()
    assert not set(router.values()) & set(other.values())


def test_a_secret_of_the_environment_is_used():
    environment = {"DUALPATH_CLUSTER_SECRET": "s" * 40}
    keys = ClusterKeys(settings(), environment)
    assert keys.engine_environment()["DUALPATH_CLUSTER_SECRET"] == "s" * 40


def test_clients_keys_reach_the_router_alone_and_no_command_line():
    chosen = settings(api_keys=("first", "second"))
    keys = ClusterKeys(chosen, {})
    assert json.loads(keys.router_environment()["DUALPATH_ROUTER_API_KEYS"]) == ["first", "second"]
    commands = [router_command(chosen, 1, 2), engine_command(chosen, Role.DECODE, 0, 3, 2)]
    secrets = {*keys.router_environment().values(), *keys.engine_environment().values(), "first"}
    for word in secrets - {"lo"}:
        assert not any(word in argument for command in commands for argument in command)


def test_ucx_stays_on_the_loopback_device_unless_set_otherwise():
    def devices(environment, **changes):
        made = ClusterKeys(settings(**changes), environment).engine_environment()
        return made.get("UCX_NET_DEVICES")

    assert devices({}) == "lo"
    assert devices({"UCX_NET_DEVICES": "mlx5_0:1"}) is None
    assert devices({}, nixl_engine_config={"NET_DEVICES": "mlx5_0:1"}) is None


def test_engines_of_gpus_with_rdma_ports_are_not_restricted_to_the_loopback_device():
    """The variable would override the port that each engine chooses for its GPU."""
    made = ClusterKeys(settings(), {}, paired_ports=True).engine_environment()
    assert "UCX_NET_DEVICES" not in made


def test_a_key_for_all_engines_is_refused():
    with pytest.raises(ConfigError, match="before --vllm-args"):
        settings(vllm_args=("--api-key", "k"))


def test_on_several_machines_the_secret_is_the_operators_and_ucx_takes_every_device():
    with pytest.raises(ConfigError, match="export DUALPATH_CLUSTER_SECRET="):
        ClusterKeys(settings(), {}, one_machine=False)
    environment = {"DUALPATH_CLUSTER_SECRET": "s" * 40}
    engine = ClusterKeys(settings(), environment, one_machine=False).engine_environment()
    assert engine["DUALPATH_CLUSTER_SECRET"] == "s" * 40
    assert "UCX_NET_DEVICES" not in engine
