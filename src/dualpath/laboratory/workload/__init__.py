"""Workloads: agents as they were recorded, sent to an endpoint or laid out for the simulator.

``formats.read_trace`` reads sessions, and ``conversation.session`` says what they send, turn by
turn.  ``replay.client.replay`` sends it and ``replay.report.compare`` puts several runs side by
side; ``columns.from_sessions`` makes the simulator's agents of the same conversations.
"""
