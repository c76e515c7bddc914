"""The scheduler: engines register with it, front ends have it place their requests.

- ``scheduler``: the process: engines' sessions, registry, timers, attempts; ``Scheduling``
- ``dispatch``: applies events to ``policy.scheduler.RequestScheduler``, executes effects
- ``attempt`` and ``hits``: one attempt at its engines: look-up, placement, slots, reads, releases
- ``exchange``: routes answers of engines to attempts and calls
- ``registry``: the engines: which may join, which are live, groups
- ``control_server``: one session per engine, by the table of ``core.sessions``
- ``control_socket``: the ZMQ socket under it, its guard and its limits
- ``releases`` and ``pauses``: when slots may be reused; engines that get no new requests
- ``cached_blocks``: which engines cache which blocks, as far as they have reported
- ``session_orders``: what decode engines retain and prefetch for agents' next turns
- ``roles`` and ``role_calls``: engines that change their role, groups that change their size
- ``thresholds``: α and β from engines' rates
- ``event_recorder``: the log of events and effects
- ``front_end_server``: sessions of front ends that are processes of their own
- ``link_messages``: their messages
- ``remote``: ``Scheduling`` at such a front end
- ``units``: ``Scheduling`` at a front end that knows several schedulers, each with its engines
- ``leadership`` and ``leases``: the leader among standby schedulers
"""
