"""The simulator: the live system's policies and plans under virtual time, at cluster scale."""
