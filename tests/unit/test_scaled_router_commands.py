"""The command lines of a scheduler and front ends of one machine."""

import argparse

import pytest

from dualpath.cli import frontend, scheduler
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.core.settings import arguments
from dualpath.launch.scaled_router import ScaledRouter, _environment, _link, scheduler_command
from dualpath.router.settings import LinkSettings, RouterSettings

ROUTER = RouterSettings(
    front_ends=2,
    control_host="0.0.0.0",
    control_port=5700,
    front_ends_port=5701,
    cluster_port=8001,
    mode=Mode.SPLIT,
    request_deadline_s=30.0,
    max_body_bytes=1000,
    api_keys=("secret",),
)


def parsed(module: object, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_parser(parser.add_subparsers())  # type: ignore[attr-defined]
    return parser.parse_args(words)


def test_the_scheduler_gets_its_own_settings_and_no_key_on_its_command_line() -> None:
    words = scheduler_command(ROUTER, "127.0.0.1", {"sql": "/adapters/sql"})
    assert "secret" not in " ".join(words)
    settings, address = scheduler._settings(parsed(scheduler, words))
    assert (settings.control_port, settings.front_ends_port) == (5700, 5701)
    assert settings.mode is Mode.SPLIT
    assert settings.max_body_bytes == 1000
    assert settings.request_deadline_s == RouterSettings().request_deadline_s
    assert (address.port, address.lora_modules) == (8001, {"sql": "/adapters/sql"})


def test_a_front_end_gets_its_clients_settings_and_the_schedulers_address() -> None:
    commands: list[list[str]] = []

    def words(own: RouterSettings, link: LinkSettings) -> list[str]:
        commands.append(["frontend", "m", *arguments(own), *arguments(link)])
        return commands[-1]

    ScaledRouter(ROUTER, "127.0.0.1", words)
    names = set()
    for command in commands:
        router, _, found = frontend._settings(parsed(frontend, command))
        assert router.request_deadline_s == 30.0
        assert router.api_keys == ()
        assert found.scheduler == "tcp://127.0.0.1:5701"  # anywhere, so here as well
        assert found.share_port
        names.add(found.front_end_name)
    assert len(names) == 2
    assert _link(ROUTER, 0).front_end_name in names  # a restarted one has its name again


def test_settings_of_the_environment_apply_once_and_keys_are_passed_in_it() -> None:
    environment = {
        "PATH": "/bin",
        "DUALPATH_ROUTER_MODE": "basic",
        "DUALPATH_CLUSTER_SECRET": "s",
        "VLLM_API_KEY": "k",
    }
    assert _environment(ROUTER, environment) == {
        "PATH": "/bin",
        "DUALPATH_CLUSTER_SECRET": "s",
        "VLLM_API_KEY": "k",
        "DUALPATH_ROUTER_API_KEYS": '["secret"]',
    }


@pytest.mark.parametrize("other", [{"standby_lock": "lock"}, {"standby_lease": "etcd://h:1/n"}])
def test_front_ends_exclude_standby_routers(other: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="is started again by itself"):
        RouterSettings(front_ends=1, **other)  # type: ignore[arg-type]
