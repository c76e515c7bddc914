"""Metrics of an emulated engine at /metrics."""

import threading
from types import SimpleNamespace
from typing import Any

from dualpath.engine.counters import Counter, Counters
from dualpath_lab.emulated.checkable_kv import CheckedAt
from dualpath_lab.emulated.metrics import EngineMetrics, engine_counts, thread_cpu_s


def test_verification_counts_are_parsed_as_served() -> None:
    counters = Counters()
    counters.add(Counter.H2D_BYTES, 1.5e9)
    seen = {CheckedAt.DE_HBM: (3480, 0), CheckedAt.PE_HBM: (12, 5)}
    plane: Any = SimpleNamespace(
        verifier=SimpleNamespace(counts=lambda: seen), manager=SimpleNamespace(counters=counters)
    )
    served = EngineMetrics(plane).exposition().decode()
    counts = engine_counts(served)
    assert counts.verified == {"de_hbm": 3480, "pe_hbm": 12}
    assert counts.wrong == {"de_hbm": 0, "pe_hbm": 5}
    assert counts.thread_cpu_s["MainThread"] > 0
    assert 'dualpath_emulated:wrong_layer_blocks_total{place="pe_hbm"} 5.0\n' in served
    assert 'dualpath_emulated:counter_total{name="h2d_bytes"} 1.5e+09\n' in served
    assert engine_counts("") == ({}, {}, {})


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
