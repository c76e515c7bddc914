"""CPU time of an engine, by thread."""

import threading

from dualpath.laboratory.emulated.metrics import thread_cpu_s


def test_time_is_counted_under_the_name_of_the_thread_that_took_it() -> None:
    spun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        sum(range(2_000_000))
        spun.set()
        go_on.wait()

    workers = [threading.Thread(target=work, name=f"worker_{i}", daemon=True) for i in range(2)]
    sleeper = threading.Thread(target=go_on.wait, name="sleeper", daemon=True)
    for thread in (*workers, sleeper):
        thread.start()
    spun.wait()
    found = thread_cpu_s()
    go_on.set()
    for thread in (*workers, sleeper):
        thread.join()
    assert found["worker"] > found["sleeper"]
