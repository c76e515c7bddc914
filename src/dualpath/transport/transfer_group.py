"""Several posted transfers as one: the parts of a layer, each with its own work list."""

from collections.abc import Callable, Sequence

from dualpath.core.errors import DualPathError
from dualpath.transport.contract import Transfer, TransferState


def post_together(posts: Sequence[Callable[[], Transfer]]) -> Transfer:
    """Post all of ``posts`` and return a transfer that ends when the last of them has ended.

    An exception of the first post is raised: then nothing was posted.  If a later post fails, the
    returned transfer fails once the posted ones have ended.
    """
    first, *others = posts
    posted = [first()]
    refusal: str | None = None
    for post in others:
        try:
            posted.append(post())
        except DualPathError as error:
            refusal = str(error)
            break
    return posted[0] if len(posts) == 1 else TransferGroup(posted, refusal)


class TransferGroup:
    """See ``dualpath.transport.contract.Transfer``; ``refusal``: error of a post that failed.

    The group is MOVING as long as any transfer is, so that no memory is reused before.
    """

    def __init__(self, transfers: Sequence[Transfer], refusal: str | None = None) -> None:
        self.bytes = sum(transfer.bytes for transfer in transfers)
        self._transfers = transfers
        self._refusal = refusal

    def poll(self) -> TransferState:
        """Drive all transfers and return the state of the group."""
        states = {transfer.poll() for transfer in self._transfers}
        if TransferState.MOVING in states:
            return TransferState.MOVING
        failed = self._refusal is not None or TransferState.FAILED in states
        return TransferState.FAILED if failed else TransferState.DONE

    def error(self) -> str | None:
        """Return the error of the first transfer that failed, or None."""
        errors = (transfer.error() for transfer in self._transfers)
        return next((error for error in errors if error is not None), self._refusal)

    def release(self) -> None:
        """Release all handles."""
        for transfer in self._transfers:
            transfer.release()
