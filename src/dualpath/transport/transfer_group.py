"""Several posted transfers that count as one: the parts of a layer, each with a work list."""

from collections.abc import Callable, Sequence

from dualpath.core.errors import DualPathError
from dualpath.transport.contract import Transfer, TransferState


def post_together(posts: Sequence[Callable[[], Transfer]]) -> Transfer:
    """Post all of ``posts`` and return what ends when the last of them has ended.

    Raises what the first of them raises: nothing moves then.  If a later one cannot be posted, what
    is returned has failed once nothing of the others moves any more.
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
    """See ``dualpath.transport.contract.Transfer``; ``refusal``: why part of it is not there.

    It is MOVING as long as any of them is: memory of one that failed is not free before.
    """

    def __init__(self, transfers: Sequence[Transfer], refusal: str | None = None) -> None:
        self.bytes = sum(transfer.bytes for transfer in transfers)
        self._transfers = transfers
        self._refusal = refusal

    def poll(self) -> TransferState:
        """Drive all of them."""
        states = {transfer.poll() for transfer in self._transfers}
        if TransferState.MOVING in states:
            return TransferState.MOVING
        failed = self._refusal is not None or TransferState.FAILED in states
        return TransferState.FAILED if failed else TransferState.DONE

    def error(self) -> str | None:
        """Return why the first that failed did, or None."""
        errors = (transfer.error() for transfer in self._transfers)
        return next((error for error in errors if error is not None), self._refusal)

    def release(self) -> None:
        """Give all handles back."""
        for transfer in self._transfers:
            transfer.release()
