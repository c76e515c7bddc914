"""Bad input on purpose: nothing that can be sent or stored may break what reads it."""
