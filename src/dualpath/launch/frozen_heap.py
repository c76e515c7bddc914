"""Imported last by a fork server: excludes its objects from garbage collection.

Forked processes then do not scan these objects (vLLM collects when it starts to serve), which
would copy their pages.
"""

import gc

gc.collect()
gc.freeze()
