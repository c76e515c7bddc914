"""Frames between a front end and its scheduler: one for all that a turn of the loop says."""

import asyncio

import msgspec

from dualpath.core.envelopes import outside
from dualpath.router.links import messages as m
from dualpath.router.links.frames import Frames

_DECODER = msgspec.msgpack.Decoder(m.FromFrontEnd)
FIRST, SECOND, THIRD = (m.Over(f"attempt {n}", "finished") for n in range(3))


async def test_what_is_said_in_one_turn_travels_in_one_frame_and_in_order() -> None:
    sent: list[bytes] = []
    frames: Frames[m.FrontEndMessage] = Frames(sent.append)
    frames.add([outside(FIRST)])
    frames.add([outside(SECOND)])
    assert sent == []
    await asyncio.sleep(0)
    frames.add([outside(THIRD)])
    await asyncio.sleep(0)
    said = [[envelope.message for envelope in _DECODER.decode(frame)] for frame in sent]
    assert said == [[FIRST, SECOND], [THIRD]]


async def test_what_was_gathered_goes_before_the_end_and_once() -> None:
    sent: list[bytes] = []
    frames: Frames[m.FrontEndMessage] = Frames(sent.append)
    frames.add([outside(FIRST)])
    frames.flush()
    await asyncio.sleep(0)
    assert len(sent) == 1
