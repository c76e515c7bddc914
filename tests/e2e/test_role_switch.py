"""Engines change their role under agents by an HTTP call; no request fails, no byte is wrong."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.small_costs import COSTS
from tests.e2e.test_emulated_cluster import ENGINE, Processes
from tests.e2e.test_rolling_restart import (
    AGENTS,
    ENGINES,
    Cluster,
    all_there,
    epoch_of,
    under_load,
    until,
    well_after,
)

from dualpath.cli.main import main
from dualpath.core.cluster import Role, UnitShape
from dualpath.core.errors import DualPathError
from dualpath.core.modes import DEFAULT_MODE
from dualpath.launch.local_cluster import RequestedRoles
from dualpath.launch.process import LocalProcess, Restarts
from dualpath.router.scheduler.role_calls import call_roles


class Supervised(Cluster):
    """A cluster that restarts engines in the role that the router requests."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        super().__init__(folder, processes)
        self.shapes = {name: UnitShape(Role(name.partition("-")[0])) for name in ENGINES}
        self._restarts = Restarts(self._start_again)
        units = {name: name for name in ENGINES}
        self._wishes = RequestedRoles(self._ask, units, self.shapes, lambda role: 1, self._change)

    def start(self, name: str) -> LocalProcess:
        if name not in self.shapes:
            return super().start(name)
        role = self.shapes[name].role.value
        return self._processes.start(name, role, self._control, *ENGINE, "--engine-id", name)

    def _start_again(self, name: str) -> None:
        self.start(name)

    def _ask(self) -> dict[str, Any] | None:
        try:
            return call_roles(self.endpoint, {})
        except DualPathError:
            return None

    def _change(self, name: str, shape: UnitShape) -> None:
        self.shapes[name] = shape
        self._restarts.expect_exit(name, time.monotonic())
        self._processes.process(name).terminate()

    @contextlib.asynccontextmanager
    async def supervised(self) -> AsyncIterator[None]:
        """Supervise the engines in the block, as ``dualpath serve`` does."""

        async def watch() -> None:
            while True:
                engines = [self._processes.process(name) for name in ENGINES]
                self._restarts.poll(engines, time.monotonic())
                self._wishes.poll(time.monotonic())
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "costs.toml").write_text(COSTS)
    with Processes(tmp_path, DEFAULT_MODE) as processes:
        yield processes


@pytest.mark.long
async def test_no_request_fails_while_engines_change_their_role_and_back(
    tmp_path: Path,
    processes: Processes,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = Supervised(tmp_path, processes)
    async with under_load(made) as (http, agents), made.supervised():
        await well_after(agents, 2 * AGENTS)
        epoch = await epoch_of(http, made.endpoint, "prefill-1")
        command = ["roles", "--endpoint", made.endpoint]
        assert await asyncio.to_thread(main, [*command, "--set", "prefill-1=decode"]) == 0
        assert capsys.readouterr().out.startswith("1P3D\n")
        await until(functools.partial(all_there, http, made.endpoint, {epoch}))
        await well_after(agents, 2 * AGENTS)
        # The last prefill engine stays.
        assert await asyncio.to_thread(main, [*command, "--set", "prefill-0=decode"]) == 2
        assert await asyncio.to_thread(main, [*command, "--nodes", "2P2D"]) == 0
        output = capsys.readouterr()
        assert output.out.startswith("2P2D\n")
        assert "at least 1 has to stay" in output.err
        await well_after(agents, 2 * AGENTS)
        async with http.get(f"{made.endpoint}/metrics") as answer:
            counted = await answer.text()
    assert set(agents.ends) == {"well"}, agents.ends
    assert 'outcome="joined",reason="asked",to_role="decode"} 1.0' in counted
    restarted = "prefill-1 has exited as requested and is restarted"
    ended = [r.message for r in caplog.records if r.name == "dualpath.launch.process"]
    assert ended[0] == restarted
    assert len(ended) == 2  # and no process ended by itself
    print(dict(agents.ends), output.out)
