"""What all messages of the control plane have in common."""

import msgspec


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all control messages."""
