"""Commands of the system: one module per subcommand, imported only when it is used."""

#: Subcommands of `dualpath` with their one-line helps (``dualpath.cli.main``).
SUBCOMMANDS = {
    "serve": "start router, prefill and decode engines on this machine",
    "router": "start the router alone; engines register themselves with it",
    "scheduler": "start the scheduler alone; engines and front ends register with it",
    "frontend": "start a further front end of a router; all front ends share its engines",
    "roles": "print or change the roles of engines while they serve",
    "weights": "change the weights of all engines for a trainer, or let them sleep",
    "replay": "replay agent trajectories against an endpoint",
    "record": "write live traffic as a trace: lengths, times and numbered blocks, no text",
    "report": "turn replay results into a table and an HTML page",
    "config": "check settings from flags, environment and file, and print the origin of each",
    "storage": "list, verify, pin or remove stored blocks; keep a storage within limits",
    "doctor": "check a node for everything that engines need, and print remedies",
    "qos": "print the settings that keep KV from delaying model communication",
}

#: Those that read settings; each has a function ``checked_layers``.
CONFIGURED = ("serve", "router", "scheduler", "frontend")
