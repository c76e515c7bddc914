"""The wire form of control messages: each is in an envelope with its place in a session."""

from collections.abc import Iterable
from typing import Annotated, Generic, TypeVar

import msgspec

from dualpath.core.control import PROTOCOL_VERSION, EngineMessage, RouterMessage
from dualpath.core.errors import IncompatibleError
from dualpath.core.message import Message
from dualpath.core.names import Name, in_one_line

M = TypeVar("M", bound=Message)


class Envelope(
    msgspec.Struct, Generic[M], frozen=True, array_like=True, forbid_unknown_fields=True
):
    """A message on the wire, with its place in a session (``core.sessions.Channel``).

    ``session`` is empty before one has begun.  ``number`` counts the messages of one direction
    from 1 on, in order; 0 marks messages that may be lost.  ``received`` acknowledges all messages
    of the other direction up to this number.
    """

    session: Name
    number: Annotated[int, msgspec.Meta(ge=0)]
    received: Annotated[int, msgspec.Meta(ge=0)]
    message: M


_Decoded = TypeVar("_Decoded")

FromRouter = Envelope[RouterMessage]
FromEngine = Envelope[EngineMessage]

_ENCODER = msgspec.msgpack.Encoder()
_ROUTER_DECODER: msgspec.msgpack.Decoder[FromRouter] = msgspec.msgpack.Decoder(FromRouter)
_ENGINE_DECODER: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def unnumbered(message: M, session: str = "") -> Envelope[M]:
    """Return a message in an envelope without a number, outside of any channel."""
    return Envelope(session, 0, 0, message)


def encode(envelope: Envelope[M]) -> bytes:
    """Return the wire form of a message in its envelope."""
    return _ENCODER.encode(envelope)


def encode_batches(envelopes: Iterable[Envelope[M]], max_bytes: int) -> list[bytes]:
    """Return frames of several messages each, in order, of at most ``most_bytes``.

    A larger message is a frame of its own.
    """
    frames: list[list[msgspec.Raw]] = []
    size_bytes = max_bytes
    for envelope in envelopes:
        encoded = encode(envelope)
        size_bytes += len(encoded)
        if size_bytes > max_bytes:
            frames.append([])
            size_bytes = len(encoded)
        frames[-1].append(msgspec.Raw(encoded))
    return [_ENCODER.encode(frame) for frame in frames]


def decode_router_message(frame: bytes) -> FromRouter:
    """Decode what a router sent; raises ``IncompatibleError`` for anything malformed."""
    return decode_with(_ROUTER_DECODER, frame)


def decode_engine_message(frame: bytes) -> FromEngine:
    """Decode what an engine sent; raises ``IncompatibleError`` for anything malformed."""
    return decode_with(_ENGINE_DECODER, frame)


def decode_with(decoder: msgspec.msgpack.Decoder[_Decoded], frame: bytes) -> _Decoded:
    """Decode a frame of other messages; raises ``IncompatibleError`` for anything malformed."""
    try:
        return decoder.decode(frame)
    # ValueError: text that is not UTF-8; RecursionError: nested deeper than any message.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise IncompatibleError(
            f"control message of {len(frame)} bytes is not of protocol {PROTOCOL_VERSION}: "
            f"{in_one_line(str(error))}; run the same dualpath version on router and engines"
        ) from error
