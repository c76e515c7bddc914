"""A transfer group ends with the last of its transfers, and does not fail earlier."""

from collections.abc import Callable

import pytest

from dualpath.core.errors import TransportError
from dualpath.transport.contract import Transfer, TransferState, post_together


class Piece:
    """A transfer with a settable state."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = size_bytes
        self.state = TransferState.MOVING
        self.released = False

    def poll(self) -> TransferState:
        return self.state

    def error(self) -> str | None:
        return "torn" if self.state is TransferState.FAILED else None

    def release(self) -> None:
        assert self.state is not TransferState.MOVING
        self.released = True


def refuse() -> Transfer:
    raise TransportError("no such region")


def posts(*pieces: Piece) -> list[Callable[[], Transfer]]:
    return [lambda piece=piece: piece for piece in pieces]  # type: ignore[misc]


def test_a_single_transfer_is_returned_unchanged() -> None:
    piece = Piece(3)
    assert post_together(posts(piece)) is piece


def test_it_is_done_when_all_are() -> None:
    first, second = Piece(3), Piece(4)
    both = post_together(posts(first, second))
    assert both.bytes == 7
    first.state = TransferState.DONE
    assert both.poll() is TransferState.MOVING
    second.state = TransferState.DONE
    assert (both.poll(), both.error()) == (TransferState.DONE, None)
    both.release()
    assert first.released
    assert second.released


def test_a_failure_fails_the_group_after_all_transfers_ended() -> None:
    first, second = Piece(3), Piece(4)
    both = post_together(posts(first, second))
    first.state = TransferState.FAILED
    assert both.poll() is TransferState.MOVING
    second.state = TransferState.DONE
    assert (both.poll(), both.error()) == (TransferState.FAILED, "torn")
    both.release()
    assert first.released
    assert second.released


def test_nothing_is_posted_if_the_first_is_refused() -> None:
    with pytest.raises(TransportError, match="no such region"):
        post_together([refuse, *posts(Piece(1))])


def test_a_later_refusal_fails_the_group_after_posted_transfers_ended() -> None:
    first, never = Piece(3), Piece(4)
    both = post_together([*posts(first), refuse, *posts(never)])
    assert (both.bytes, both.poll()) == (3, TransferState.MOVING)
    first.state = TransferState.DONE
    assert (both.poll(), both.error()) == (TransferState.FAILED, "no such region")
    both.release()
    assert first.released
    assert not never.released
