"""The reference core: the page ``docs/simulator.md`` in plain Python, driving RequestScheduler."""
