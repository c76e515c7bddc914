"""The base class of control messages."""

import msgspec


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all control messages."""
