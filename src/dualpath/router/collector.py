"""Python's collector of cyclic garbage, in a process that serves from an event loop.

By default it looks at the youngest objects whenever there are 700 more of them, and at all objects
when there are a quarter more.  With 1,500 streams that was a fourth of a front end's CPU, and each
look at everything stopped its event loop for 0.2 s of CPU; a look at a tuple of a prompt's keys
looks at each of them.  Nearly all that a request leaves is freed without the collector, as soon as
nobody refers to it.
"""

import gc

#: Objects more before the youngest are looked at; such looks before one at the middle generation;
#: such looks before one at everything.
THRESHOLDS = (10_000, 20, 50)


def collect_seldom() -> None:
    """To be called once all is loaded and before anything is served.

    What there is by then is never looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
