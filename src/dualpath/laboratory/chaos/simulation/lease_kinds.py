"""What goes wrong where schedulers take turns by a lease: with them, and with its store."""

from collections.abc import Callable

from dualpath.laboratory.chaos.simulation.adversary import Adversary, Kind, Part

#: How often calls of a store are late, come twice or are not answered, while they are.
_OFTEN = 0.5
#: So long who has the lease stands still: until another has had the time to take it.
_OUTLIVES_S = (1.5, 2.0, 3.0)


def _terminate_router(adversary: Adversary) -> None:
    """SIGTERM: it drains, and gives the lease up."""
    router = adversary.cluster.router
    if router.serves:
        router.terminate()


def _outlive_lease(adversary: Adversary) -> None:
    """SIGSTOP, and SIGCONT when the lease is another's."""
    go_on = adversary.stop(adversary.cluster.router.process)
    adversary.world.after(adversary.world.pick(_OUTLIVES_S), go_on)


def _cut_router(adversary: Adversary) -> Callable[[], None]:
    """Let nothing of who has the lease reach the store."""
    cut, name = adversary.cluster.shared.turns.faults.cut, adversary.cluster.router.name
    adversary.world.note(name, "does not reach the store of leases")
    cut.add(name)
    return lambda: cut.discard(name)


def _store(name: str, value: float) -> Callable[[Adversary], Callable[[], None]]:
    return lambda adversary: adversary.set(adversary.cluster.shared.turns.faults, name, value)


def _kind(name: str, begin: Callable[[Adversary], Callable[[], None] | None]) -> Kind:
    return Kind(name, begin, needs=Part.LEASE)


LEASE_KINDS = (
    _kind("terminate the router", _terminate_router),
    _kind("stop the router for longer than its lease", _outlive_lease),
    _kind("cut the router from the store of leases", _cut_router),
    _kind("unreachable store of leases", _store("unreachable", True)),
    _kind("slow store of leases", _store("slow", _OFTEN)),
    _kind("lost answers of the store of leases", _store("unanswered", _OFTEN)),
    _kind("doubled calls of the store of leases", _store("doubled", _OFTEN)),
)
