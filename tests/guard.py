"""How long tests wait in real time for what has to come.

It guards a run against hanging and asserts nothing: machines may be slow, and several processes
may share one core.  pytest's own limit for a test (pyproject.toml) is longer, so that what was
awaited is seen to be missing before the test is cut off.
"""

GUARD_S = 120.0
