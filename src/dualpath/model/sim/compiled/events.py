"""The event queue as a heap in a table, and pairing heaps in a pool of nodes."""

from dualpath.model.sim.compiled.columns import (
    CHILD,
    HEAP_REST,
    HEAP_TIME,
    KIND_BITS,
    NONE,
    NUMBER_SHIFT,
    ORDER,
    PENDING,
    PUSHED,
    SIBLING,
)
from dualpath.model.sim.compiled.jit import inlined, lean
from dualpath.model.sim.result import FloatArray, IntArray

#: Children of a node of the event queue: four rows share a cache line, and levels are few.
FANOUT = 4


@lean
def push(heap: IntArray, counters: IntArray, time_ns: int, kind: int, subject: int) -> int:
    """Let an event happen at ``time_ns``, after all pushed before for that time.

    Returns the number of the push.
    """
    place = counters[PENDING]
    number = counters[PUSHED]
    counters[PENDING] = place + 1
    counters[PUSHED] = number + 1
    while place > 0:
        parent = (place - 1) // FANOUT
        if heap[parent, HEAP_TIME] <= time_ns:
            # An equal time was pushed earlier.
            break
        heap[place, HEAP_TIME] = heap[parent, HEAP_TIME]
        heap[place, HEAP_REST] = heap[parent, HEAP_REST]
        place = parent
    heap[place, HEAP_TIME] = time_ns
    heap[place, HEAP_REST] = number << NUMBER_SHIFT | subject << KIND_BITS | kind
    return number


@lean
def pop(heap: IntArray, counters: IntArray) -> int:
    """Remove the next event, whose time the caller has read, and return the rest of it."""
    first = heap[0, HEAP_REST]
    size = counters[PENDING] - 1
    counters[PENDING] = size
    time_ns, rest = heap[size, HEAP_TIME], heap[size, HEAP_REST]
    place = 0
    while True:
        child = FANOUT * place + 1
        if child >= size:
            break
        if child + FANOUT <= size:
            left = child + _second_first(heap, child)
            right = child + 2 + _second_first(heap, child + 2)
            child = right if _precedes(heap, right, left) else left
        else:
            for other in range(child + 1, size):
                if _precedes(heap, other, child):
                    child = other
        least_ns, least_rest = heap[child, HEAP_TIME], heap[child, HEAP_REST]
        if time_ns < least_ns or (time_ns == least_ns and rest < least_rest):
            break
        heap[place, HEAP_TIME] = least_ns
        heap[place, HEAP_REST] = least_rest
        place = child
    heap[place, HEAP_TIME] = time_ns
    heap[place, HEAP_REST] = rest
    return first


@inlined
def _precedes(heap: IntArray, one: int, other: int) -> bool:
    # Without branches, which would be guessed wrong half of the time.
    earlier = heap[one, HEAP_TIME] < heap[other, HEAP_TIME]
    tied = heap[one, HEAP_TIME] == heap[other, HEAP_TIME]
    return earlier | (tied & (heap[one, HEAP_REST] < heap[other, HEAP_REST]))


@inlined
def _second_first(heap: IntArray, place: int) -> int:
    return int(_precedes(heap, place + 1, place))


@lean
def _meld(keys: FloatArray, links: IntArray, left: int, right: int) -> int:
    if left == NONE:
        return right
    if right == NONE:
        return left
    if keys[right] < keys[left] or (
        keys[right] == keys[left] and links[right, ORDER] < links[left, ORDER]
    ):
        left, right = right, left
    links[right, SIBLING] = links[left, CHILD]
    links[left, CHILD] = right
    return left


@lean
def add_node(
    keys: FloatArray, links: IntArray, root: int, node: int, key: float, order: int
) -> int:
    """Put a node into the pairing heap at ``root`` (NONE: empty) and return the new root."""
    keys[node] = key
    links[node, ORDER] = order
    links[node, CHILD] = NONE
    links[node, SIBLING] = NONE
    return _meld(keys, links, root, node)


@lean
def drop_root(keys: FloatArray, links: IntArray, root: int) -> int:
    """Remove the least node and return the new root, NONE when empty."""
    paired = NONE
    node = links[root, CHILD]
    while node != NONE:
        second = links[node, SIBLING]
        links[node, SIBLING] = NONE
        if second == NONE:
            links[node, SIBLING] = paired
            paired = node
            break
        rest = links[second, SIBLING]
        links[second, SIBLING] = NONE
        both = _meld(keys, links, node, second)
        links[both, SIBLING] = paired
        paired = both
        node = rest
    root = NONE
    while paired != NONE:
        rest = links[paired, SIBLING]
        links[paired, SIBLING] = NONE
        root = _meld(keys, links, root, paired)
        paired = rest
    return root
