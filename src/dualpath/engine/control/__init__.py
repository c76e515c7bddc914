"""The engine's side of the control plane: its session with the router, and what that asks for."""
