"""Engines as the router knows them: their connections, the ledger, assignments."""
