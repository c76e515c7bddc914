"""The engines, as a front end behind a link knows them."""

import logging
from collections.abc import Sequence

from dualpath.core.blocks import StoreNamespace
from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.router.control.served_adapters import ServedAdapters, changed
from dualpath.router.engines import EngineInfo
from dualpath.router.links import messages as m

logger = logging.getLogger(__name__)


class EnginesView:
    """The ``KnownEngines`` that the scheduler told last; none without a session.

    ``namespace`` is the first that it told, for which keys have been made since, as the weights of
    ``adapters`` are those that it told first.  ``away`` says why there is no session.
    """

    def __init__(self, away: str, adapters: ServedAdapters) -> None:
        self.away = away
        self.adapters = adapters
        self.mode: Mode | None = None
        self.namespace: StoreNamespace | None = None
        self.engines: tuple[EngineInfo, ...] = ()

    def alive(self, role: Role | None = None) -> Sequence[EngineInfo]:
        """Return the live engines (of one role), by arrival."""
        return [engine for engine in self.engines if role in (None, engine.role)]

    def waits(self) -> Sequence[str]:
        """Say why the scheduler tells of no engines, if so."""
        return [self.away] if self.away else []

    def tell(self, now: m.EnginesNow) -> None:
        """Take down what the scheduler says; those of another model or adapter are none."""
        self.mode, self.engines, self.away = now.mode, now.engines, ""
        self.namespace = self.namespace or now.namespace
        if now.namespace not in (None, self.namespace):
            self._refuse("engines of another model")
            return
        served = {adapter.name: adapter.digest for adapter in now.adapters}
        # One that knows no engines yet knows no adapters either.
        if now.namespace and (other := changed(self.adapters.digests(), served)) is not None:
            self._refuse(f"no adapter {other!r}, or other weights of it,")
            return
        self.adapters.learn_if_listed(now.adapters)

    def _refuse(self, what: str) -> None:
        self.engines = ()
        self.away = f"the scheduler has {what} now; restart this front end"
        logger.error("%s", self.away)

    def lose(self, away: str) -> None:
        """There is no session any more."""
        self.engines, self.away = (), away

    def limit(self, name: str) -> int | None:
        """Return the smallest value of an integer limit over live engines, None if unstated."""
        values = [engine.limits.get(name) for engine in self.engines]
        return min((v for v in values if isinstance(v, int)), default=None)
