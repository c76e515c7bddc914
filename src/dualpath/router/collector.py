"""Python's collector of cyclic garbage, in a process that serves from an event loop.

By default it looks at the youngest objects whenever there are 700 more of them, and at all objects
when there are a quarter more.  Requests have a thousand keys and slots each, and a look at a tuple
of them looks at each: a fifth of a scheduler's CPU went there, and with thousands of streams a look
at everything stops the loop for longer than a client should wait.  Nearly all that a request leaves
is freed without the collector, as soon as nobody refers to it.
"""

import gc

#: Objects more before the youngest are looked at; such looks before one at the middle generation;
#: such looks before one at everything.
THRESHOLDS = (20_000, 20, 50)


def collect_seldom() -> None:
    """To be called once all is loaded and before anything is served.

    What there is by then is never looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
