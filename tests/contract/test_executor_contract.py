"""Contract of executors, wherever they run the processes."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.guard import GUARD_S, ends
from tests.launched import ENTRY
from tests.ray_cluster import RayCluster

from dualpath.core.cluster import Role
from dualpath.launch.executor import Executor, Launch, LocalExecutor, Place, Unit
from dualpath.launch.process import ManagedProcess, Supervisor
from dualpath.launch.settings import LocalClusterSettings

ENGINE = Unit("pe-0", ("pe-0",), Role.PREFILL)
GROUP = Unit("de-0", ("de-0-dp0", "de-0-dp1"), Role.DECODE)


def settings(**changes: Any) -> LocalClusterSettings:
    return LocalClusterSettings(model="m", storage="kv", **changes)


@pytest.fixture(scope="module", params=["local", "ray"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "local":
        yield LocalExecutor(settings(), preload=())
        return
    cluster: RayCluster = request.getfixturevalue("ray_cluster")
    from dualpath.launch.ray_executor import RayExecutor

    made = RayExecutor(settings(ray_address=cluster.address), environment={})
    made.reserve([ENGINE, GROUP])
    yield made
    made.close()
    made.close()


@contextmanager
def started(
    executor: Executor, unit: Unit, logs: Path, *words: str, **variables: str
) -> Iterator[Sequence[ManagedProcess]]:
    """Run the same command in all processes of a unit."""
    launch = Launch(ENTRY, list(words), variables)
    processes = executor.start(unit, lambda place: [launch] * len(unit.processes), logs)
    with Supervisor() as supervisor:
        for process in processes:
            supervisor.add(process)
        yield processes


def test_output_is_copied_to_the_log_and_the_exit_is_reported(
    executor: Executor, tmp_path: Path
) -> None:
    log = tmp_path / "pe-0.log"
    log.write_text("of the process before\n")
    with started(executor, ENGINE, tmp_path, "end", "3") as (process,):
        assert process.wait(GUARD_S) == 3
        assert (process.exit_code, process.alive) == (3, False)
        assert process.exit_report() == "pe-0 exited with code 3; the end of its log:\nits reason"
        assert process.find_line("before") is None
    assert log.read_text() == "of the process before\nits reason\n"


def test_killing_a_process_kills_its_children_and_it_can_be_restarted(
    executor: Executor, tmp_path: Path
) -> None:
    with started(executor, ENGINE, tmp_path, "parent", GIVEN="secret") as (process,):
        own, child, given = process.wait_for_line("up", GUARD_S).split()[1:]
        assert given == "GIVEN=secret"
        assert b"secret" not in Path(f"/proc/{own}/cmdline").read_bytes()
        assert process.wait(0) is None
        process.kill()
        assert process.wait(GUARD_S) == -signal.SIGKILL
        assert ends(int(child))
        process.kill()
        process.send_signal(signal.SIGTERM)
    with started(executor, ENGINE, tmp_path, "stay") as (again,):
        again.wait_for_line("up", GUARD_S)
        assert again.alive


def test_processes_of_a_unit_share_a_place_and_exit_one_by_one_on_request(
    executor: Executor, tmp_path: Path
) -> None:
    places: list[Place] = []

    def launches(place: Place) -> list[Launch]:
        places.append(place)
        ports = [place.claim_port() for _ in GROUP.processes]
        return [Launch(ENTRY, ["stay", place.host, str(port)], {}) for port in ports]

    with Supervisor() as supervisor:
        asked, interrupted = (
            supervisor.add(process) for process in executor.start(GROUP, launches, tmp_path)
        )
        lines = [process.wait_for_line("up", GUARD_S).split() for process in (asked, interrupted)]
        assert [words[3] for words in lines] == [executor.host] * 2
        asked.terminate()
        assert asked.wait(GUARD_S) == 0
        assert asked.output().splitlines()[-1] == "asked"
        assert interrupted.alive
        interrupted.send_signal(signal.SIGINT)
        assert interrupted.wait(GUARD_S) not in (None, 0)
        assert "KeyboardInterrupt" in interrupted.output()
    assert len(places) == 1
