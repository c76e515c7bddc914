"""The event queue as a binary heap in a table, and pairing heaps in a pool of nodes."""

from dualpath.sim.compiled.jit import lean
from dualpath.sim.compiled.machine_tables import (
    HEAP_NUMBER,
    HEAP_PAYLOAD,
    HEAP_TIME,
    KIND_BITS,
    NONE,
    PENDING,
    PUSHED,
    FloatArray,
)
from dualpath.sim.result import IntArray

#: Columns of a pairing heap's nodes: order among equal keys, first child, next sibling.
ORDER, CHILD, SIBLING = range(3)


@lean
def push(heap: IntArray, counters: IntArray, time_ns: int, kind: int, number: int) -> None:
    """Let an event happen at ``time_ns``, after all pushed before for that time."""
    place = counters[PENDING]
    counters[PENDING] += 1
    pushed = counters[PUSHED]
    counters[PUSHED] += 1
    while place > 0:
        parent = (place - 1) >> 1
        if heap[parent, HEAP_TIME] <= time_ns:
            # An equal time was pushed earlier.
            break
        heap[place, 0] = heap[parent, 0]
        heap[place, 1] = heap[parent, 1]
        heap[place, 2] = heap[parent, 2]
        place = parent
    heap[place, HEAP_TIME] = time_ns
    heap[place, HEAP_NUMBER] = pushed
    heap[place, HEAP_PAYLOAD] = kind | (number << KIND_BITS)


@lean
def pop(heap: IntArray, counters: IntArray) -> int:
    """Remove the next event, whose time the caller has read, and return its payload."""
    payload = heap[0, HEAP_PAYLOAD]
    counters[PENDING] -= 1
    size = counters[PENDING]
    time_ns, number, last = heap[size, 0], heap[size, 1], heap[size, 2]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            heap[right, 0] < heap[child, 0]
            or (heap[right, 0] == heap[child, 0] and heap[right, 1] < heap[child, 1])
        ):
            child = right
        if time_ns < heap[child, 0] or (time_ns == heap[child, 0] and number < heap[child, 1]):
            break
        heap[place, 0] = heap[child, 0]
        heap[place, 1] = heap[child, 1]
        heap[place, 2] = heap[child, 2]
        place = child
    heap[place, 0] = time_ns
    heap[place, 1] = number
    heap[place, 2] = last
    return payload


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
