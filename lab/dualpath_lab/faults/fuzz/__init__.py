"""Fuzzing: no input that can be sent or stored may break its reader."""
