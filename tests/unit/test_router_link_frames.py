"""Frames between a front end and its scheduler: one for all that a turn of the loop says."""

import asyncio

import msgspec

from dualpath.core.control import unnumbered
from dualpath.router.scheduler import link_messages as m
from dualpath.router.scheduler.control_socket import LARGEST_FRAME_BYTES
from dualpath.router.scheduler.link_messages import Frames
from dualpath.router.scheduling import RequestOrder

_DECODER = msgspec.msgpack.Decoder(m.FromFrontEnd)
FIRST, SECOND, THIRD = (m.EndAttempt(f"attempt {n}", "finished") for n in range(3))


def keys_of(blocks: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(32) for number in range(blocks))


async def test_messages_of_one_loop_iteration_are_in_one_frame_and_in_order() -> None:
    sent: list[bytes] = []
    frames: Frames[m.FrontEndMessage] = Frames(sent.append)
    frames.add([unnumbered(FIRST)])
    frames.add([unnumbered(SECOND)])
    assert sent == []
    await asyncio.sleep(0)
    frames.add([unnumbered(THIRD)])
    await asyncio.sleep(0)
    received = [[envelope.message for envelope in _DECODER.decode(frame)] for frame in sent]
    assert received == [[FIRST, SECOND], [THIRD]]


async def test_all_requests_announced_to_a_returned_scheduler_are_in_frames_that_it_accepts() -> (
    None
):
    sent: list[bytes] = []
    frames: Frames[m.FrontEndMessage] = Frames(sent.append)
    requests = [m.BeginRequest(RequestOrder(f"request {n}", keys_of(1024))) for n in range(500)]
    large = m.BeginRequest(RequestOrder("large", keys_of(60_000)))
    everything: list[m.FrontEndMessage] = [*requests, large, FIRST]
    frames.add([unnumbered(message) for message in everything])
    await asyncio.sleep(0)
    received = [[envelope.message for envelope in _DECODER.decode(frame)] for frame in sent]
    assert [message for frame in received for message in frame] == everything
    assert max(map(len, sent)) < LARGEST_FRAME_BYTES
    assert len(sent) < len(requests) / 10


async def test_what_was_gathered_goes_before_the_end_and_once() -> None:
    sent: list[bytes] = []
    frames: Frames[m.FrontEndMessage] = Frames(sent.append)
    frames.add([unnumbered(FIRST)])
    frames.flush()
    await asyncio.sleep(0)
    assert len(sent) == 1
