"""Workloads: trace formats, agents that replay them against an endpoint, and reports.

``formats.read_trace`` reads sessions, ``conversation.agents.make_agents`` picks or multiplies them,
``replay.client.replay`` runs them and ``replay.report.compare`` puts several runs side by side.
"""
