"""The LoRA adapters that a router serves, and whether an engine has the same.

The front end lists them by name and path; the first engine reports their weights.  Others
must have all of them, each with that path and those weights: a request may go to any engine, and
its keys are made before it is known which.  An engine may have more, so that engines can get a new
adapter one by one before the router does.
"""

from collections.abc import Iterable, Mapping

from dualpath.core.errors import ConfigError, DualPathError
from dualpath.core.key_cache import Adapter


class ServedAdapters:
    """``paths`` are those of the front end, by name; weights are stored until the router ends.

    Stored, because keys of running requests are made of them.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = dict(paths)
        self._known: dict[str, Adapter] = {}

    def differences(self, theirs: Iterable[Adapter]) -> list[str]:
        """Return how an engine's adapters differ from those served here."""
        by_name = {adapter.name: adapter for adapter in theirs}
        found = []
        for name, path in self._paths.items():
            adapter, known = by_name.get(name), self._known.get(name)
            if adapter is None:
                found.append(f"has no adapter {name!r}; add --lora-modules {name}={path}")
            elif adapter.path != path:
                found.append(
                    f"has adapter {name!r} at {adapter.path!r}, this router at {path!r}; write the "
                    "same path in the --lora-modules of both"
                )
            elif known is not None and adapter.digest != known.digest:
                found.append(
                    f"has other weights or settings of adapter {name!r} (digest "
                    f"{adapter.digest[:16]}, others {known.digest[:16]}); give all engines the "
                    "same files, or restart the router after them to serve the new ones"
                )
        return found

    def learn(self, theirs: Iterable[Adapter]) -> None:
        """Store the adapters of an engine that differs in none."""
        for adapter in theirs:
            if adapter.name in self._paths:
                self._known.setdefault(adapter.name, adapter)

    def known(self) -> tuple[Adapter, ...]:
        """Return those that engines have."""
        return tuple(self._known.values())

    def digests(self) -> dict[str, str]:
        """Return the digests from which keys of their requests are made, by name."""
        return {name: adapter.digest for name, adapter in self._known.items()}

    def learn_if_listed(self, theirs: Iterable[Adapter]) -> None:
        """Store a scheduler's report on those that are listed here with the same path."""
        self.learn(a for a in theirs if self._paths.get(a.name) == a.path)

    def check_served(self, name: str, path: str) -> None:
        """Raise ``ConfigError`` for an adapter that is not of the front end's list."""
        if self._paths.get(name) != path:
            raise ConfigError(
                f"adapter {name!r} at {path!r} is none of those that the router was started with "
                f"({', '.join(self._paths) or 'none'}); start engines and router with it in "
                "--lora-modules"
            )

    def adapter(self, name: str, path: str) -> Adapter:
        """Return the adapter of a request; raises ``DualPathError`` before an engine has it."""
        known = self._known.get(name)
        if known is None or known.path != path:
            raise DualPathError(
                f"no engine with adapter {name!r} at {path!r} has registered yet; send the request "
                "again when one has"
            )
        return known


def changed(known: Mapping[str, str], served: Mapping[str, str]) -> str | None:
    """Return the name of an adapter that is not served as it was known, None if all are.

    Both are ``ServedAdapters.digests``: of a front end that has made keys, and of the scheduler.
    """
    return next((name for name, digest in known.items() if served.get(name) != digest), None)
