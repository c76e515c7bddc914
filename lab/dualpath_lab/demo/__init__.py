"""The demo: compares the modes of §7 on one machine, with a small model and real agent sessions."""
