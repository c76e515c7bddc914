"""Imported last by a server that processes are forked from: what it holds is no garbage.

No process forked from it looks through that again (vLLM does as it begins to serve), or copies its
pages by doing so.
"""

import gc

gc.collect()
gc.freeze()
