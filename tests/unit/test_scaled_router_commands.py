"""The command lines of a scheduler and front ends of one machine."""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from dualpath.cli import frontend, scheduler
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.core.settings import arguments
from dualpath.launch.scaled_router import (
    MetricsFolder,
    ScaledRouter,
    _environment,
    _link,
    scheduler_command,
)
from dualpath.router.observe.metrics import SHARED_METRICS, metrics_writer
from dualpath.router.settings import LinkSettings, RouterSettings, SchedulerAddress

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
    own = SchedulerAddress("127.0.0.1", 8001, "cert.pem", lora_modules={"sql": "/adapters/sql"})
    words = scheduler_command(ROUTER, own)
    assert "secret" not in " ".join(words)
    settings, address = scheduler._settings(parsed(scheduler, words))
    assert (settings.control_port, settings.front_ends_port) == (5700, 5701)
    assert settings.mode is Mode.SPLIT
    assert settings.max_body_bytes == 1000
    assert settings.request_deadline_s == RouterSettings().request_deadline_s
    assert address == own


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
    assert _link([ROUTER], 0).front_end_name in names  # a restarted one has its name again


def test_each_unit_has_a_scheduler_with_ports_of_its_own_and_front_ends_know_all() -> None:
    links: list[LinkSettings] = []

    def words(own: RouterSettings, link: LinkSettings) -> list[str]:
        assert own.units == 1
        links.append(link)
        return ["frontend", "m"]

    router = msgspec.structs.replace(ROUTER, units=3, event_log="logs/events.jsonl.xz")
    made = ScaledRouter(router, "127.0.0.1", words)
    names = [name for name in made._commands if name.startswith("scheduler")]
    assert names == ["scheduler-0", "scheduler-1", "scheduler-2"]
    found = [scheduler._settings(parsed(scheduler, [*made._commands[name]])) for name in names]
    assert [settings.control_port for settings, _ in found] == [5700, 5710, 5720]
    assert [settings.event_log for settings, _ in found] == [
        f"logs/unit-{unit}-events.jsonl.xz" for unit in range(3)
    ]
    assert [address.port for _, address in found] == [8001, 8011, 8021]
    assert made.cluster_urls == [f"http://127.0.0.1:{port}" for port in (8001, 8011, 8021)]
    scheduler_addresses = ",".join(f"tcp://127.0.0.1:{port}" for port in (5701, 5711, 5721))
    assert {link.scheduler for link in links} == {scheduler_addresses}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"front_ends": 0}, "units.* is 2 and .*front_ends.* is 0; set .* at least 1"),
        ({"cluster_port": 65530}, "from 65530 on the last one would be 65540; choose lower ports"),
    ],
)
def test_units_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterSettings(**({"front_ends": 1, "units": 2} | changes))


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


_FRONT_END = """
import sys
from dualpath.router.observe.metrics import share_metrics
share_metrics(sys.argv[1])
from prometheus_client import Counter, Gauge
Counter("answered", "").inc()
Gauge("running", "", multiprocess_mode="livesum").inc()
"""


def run_front_end(name: str, folder: str) -> None:
    """A front end that counts a request and dies while it runs."""
    environment = {**os.environ, SHARED_METRICS: folder, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", _FRONT_END, name], env=environment, check=True)


def test_a_restarted_front_end_continues_the_counters_of_its_name(
    tmp_path: Path,
) -> None:
    """Front ends that crash at every start leave no file each."""
    for name in ("front-0", "front-1", "front-1", "front-1"):
        mark_process_dead(metrics_writer(name), str(tmp_path))
        run_front_end(name, str(tmp_path))
    assert len(list(tmp_path.glob("counter_*.db"))) == 2
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    assert registry.get_sample_value("answered_total") == 4
    assert registry.get_sample_value("running") == 2


def test_the_metrics_of_a_router_that_was_killed_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, lives = MetricsFolder(), MetricsFolder()
    Path(killed.path, "counter_1.db").touch()
    os.close(killed._lock)  # as the kernel does
    killed._folder._finalizer.detach()  # type: ignore[attr-defined]
    foreign = tmp_path / "dualpath-metrics-of-another-program"
    foreign.mkdir()
    started = MetricsFolder()
    assert not Path(killed.path).exists()
    assert all(Path(each).exists() for each in (lives.path, started.path, foreign))
    for folder in (lives, started):
        folder.cleanup()
        folder.cleanup()
    assert list(tmp_path.iterdir()) == [foreign]


@pytest.mark.parametrize("other", [{"standby_lock": "lock"}, {"standby_lease": "etcd://h:1/n"}])
def test_front_ends_exclude_standby_routers(other: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="is started again by itself"):
        RouterSettings(front_ends=1, **other)  # type: ignore[arg-type]
