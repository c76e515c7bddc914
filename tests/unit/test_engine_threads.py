"""Workers: a pool of threads with one queue."""

import threading

from tests.guard import GUARD_S

from dualpath.engine.threads import OS_THREADS, Workers


def test_one_worker_does_its_work_in_order() -> None:
    done: list[int] = []
    over = threading.Event()
    workers = Workers(OS_THREADS, "worker", 1)
    for number in range(3):
        assert workers.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    workers.submit(over.set)
    assert over.wait(GUARD_S)
    workers.close()
    assert done == [0, 1, 2]


def test_work_that_fails_does_not_end_its_thread() -> None:
    over = threading.Event()
    workers = Workers(OS_THREADS, "worker", 1)
    workers.submit(lambda: [][0])
    workers.submit(over.set)
    assert over.wait(GUARD_S)
    workers.close()


def test_closed_workers_finish_what_they_have_begun_and_drop_the_rest() -> None:
    begun, go_on, closing = threading.Event(), threading.Event(), threading.Event()
    done: list[str] = []

    def slow() -> None:
        begun.set()
        go_on.wait(GUARD_S)
        done.append("slow")

    workers = Workers(OS_THREADS, "worker", 1)
    workers.submit(slow)
    workers.submit(lambda: done.append("dropped"))
    assert begun.wait(GUARD_S)

    def close() -> None:
        workers.close()
        closing.set()

    closer = threading.Thread(target=close)
    closer.start()
    while workers.submit(lambda: None):
        pass
    go_on.set()
    assert closing.wait(GUARD_S)
    closer.join()
    assert done == ["slow"]
