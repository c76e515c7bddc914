"""Faults of schedulers that are elected by a lease, and of the store of leases."""

from collections.abc import Callable

from dualpath.laboratory.chaos.simulation.adversary import Adversary, ClusterFeature, FaultKind

#: Probability that a call to the store is slow, doubled or unanswered during such a fault.
_OFTEN = 0.5
#: How long the lease's holder is stopped: long enough for another to acquire the lease.
_OUTLIVES_S = (1.5, 2.0, 3.0)


def _terminate_router(adversary: Adversary) -> None:
    """SIGTERM: it drains and releases the lease."""
    router = adversary.cluster.router
    if router.serves:
        router.terminate()


def _outlive_lease(adversary: Adversary) -> None:
    """SIGSTOP, and SIGCONT after another has acquired the lease."""
    resume = adversary.stop(adversary.cluster.router.process)
    adversary.world.after(adversary.world.pick(_OUTLIVES_S), resume)


def _cut_router(adversary: Adversary) -> Callable[[], None]:
    """Cut the lease's holder off from the store."""
    cut, name = adversary.cluster.shared.leadership.faults.cut, adversary.cluster.router.name
    adversary.world.note(name, "does not reach the store of leases")
    cut.add(name)
    return lambda: cut.discard(name)


def _store(name: str, value: float) -> Callable[[Adversary], Callable[[], None]]:
    return lambda adversary: adversary.set(adversary.cluster.shared.leadership.faults, name, value)


def _kind(name: str, begin: Callable[[Adversary], Callable[[], None] | None]) -> FaultKind:
    return FaultKind(name, begin, needs=ClusterFeature.LEASE)


LEASE_FAULT_KINDS = (
    _kind("terminate the router", _terminate_router),
    _kind("stop the router for longer than its lease", _outlive_lease),
    _kind("cut the router from the store of leases", _cut_router),
    _kind("unreachable store of leases", _store("unreachable", True)),
    _kind("slow store of leases", _store("slow", _OFTEN)),
    _kind("lost answers of the store of leases", _store("unanswered", _OFTEN)),
    _kind("doubled calls of the store of leases", _store("doubled", _OFTEN)),
)
