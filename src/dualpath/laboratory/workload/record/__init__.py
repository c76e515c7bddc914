"""Live traffic as a trace: a proxy that sees requests pass, and the sessions that they make."""
