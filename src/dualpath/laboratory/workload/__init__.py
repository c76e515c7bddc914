"""Workloads: trace formats, agents that replay them against an endpoint, and reports.

``formats.read_trace`` reads sessions, ``agents.make_agents`` picks or multiplies them,
``replay.replay`` runs them, ``report.compare`` puts several runs side by side and
``html_report.write_html`` draws them.
"""
