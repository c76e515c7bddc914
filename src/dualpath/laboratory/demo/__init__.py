"""The demo: real agent sessions on a small real model, the modes of §7 on one machine."""
