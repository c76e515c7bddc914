"""Workloads: recorded agents, replayed against an endpoint or converted for the simulator.

``formats.read_trace`` reads sessions, and ``conversation.session`` produces their turns.
``replay.client.replay`` sends the turns to an endpoint and ``replay.report.compare`` reports
several runs side by side.  ``columns.from_sessions`` converts the same conversations to agents of
the simulator.
"""
