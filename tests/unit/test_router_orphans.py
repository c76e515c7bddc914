"""Attempts that decode on after their scheduler: when their engine counts as lost."""

from typing import Any, cast

import msgspec
import pytest
from tests.unit.router_cluster import cluster

from dualpath.core.cluster import Role
from dualpath.core.errors import EngineLostError
from dualpath.router.engines import EngineInfo
from dualpath.router.scheduler.remote import REGISTERED_AGAIN_S, OrphanedAttempts

pytestmark = pytest.mark.virtual_time


class Orphan:
    def __init__(self, engine: EngineInfo) -> None:
        self.decode_engine = engine
        self.broken: list[str] = []

    def break_off(self, error: EngineLostError) -> None:
        self.broken.append(str(error))


class Story:
    """One orphaned attempt at an engine, and time."""

    def __init__(self, engine: EngineInfo) -> None:
        self.now_s = 0.0
        self.engine = engine
        self.orphan = Orphan(engine)
        self.orphans = OrphanedAttempts(lambda: self.now_s)
        self.orphans.begin([cast(Any, self.orphan)])

    def after(self, seconds: float) -> list[str]:
        self.now_s += seconds
        self.orphans.expire()
        return self.orphan.broken


@pytest.fixture
async def engine() -> EngineInfo:
    async with cluster() as made:
        return made.service.registry.alive(Role.DECODE)[0]


def test_without_a_scheduler_no_orphan_is_declared_lost(engine: EngineInfo) -> None:
    assert Story(engine).after(100 * REGISTERED_AGAIN_S) == []


def test_an_engine_that_returns_and_leaves_again_is_lost(engine: EngineInfo) -> None:
    story = Story(engine)
    story.orphans.update(())
    story.orphans.update([engine])
    assert story.after(100 * REGISTERED_AGAIN_S) == []
    story.orphans.update(())
    assert "engine d0 is lost" in story.after(0.0)[0]
    story.orphans.update(())
    assert len(story.orphan.broken) == 1


def test_an_engine_that_does_not_return_is_lost_after_the_time_out(engine: EngineInfo) -> None:
    story = Story(engine)
    story.orphans.update(())
    assert story.after(REGISTERED_AGAIN_S) == []
    assert "has not registered again within 30 s" in story.after(0.1)[0]


def test_another_process_of_the_engine_proves_that_the_former_has_exited(
    engine: EngineInfo,
) -> None:
    story = Story(engine)
    story.orphans.update([msgspec.structs.replace(engine, epoch="next")])
    assert "engine d0 is lost" in story.after(0.0)[0]


def test_an_orphan_that_ends_by_itself_is_removed(engine: EngineInfo) -> None:
    story = Story(engine)
    story.orphans.update([engine])
    story.orphans.discard(cast(Any, story.orphan))
    story.orphans.update(())
    assert story.after(REGISTERED_AGAIN_S) == []
