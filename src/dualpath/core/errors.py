"""The whole exception tree of dualpath.

    DualPathError
    ├── ConfigError            a setting is wrong; raised before anything starts
    ├── BadRequestError        a client's request cannot be served as asked
    │   └── PromptTooLongError     its prompt has more tokens than may be served
    ├── TurnedAwayError        not started; the same request may be served later
    │   ├── OverloadedError        more requests at once than the router accepts
    │   └── DrainingError          the router is about to end
    ├── TraceError             a workload trace is malformed
    ├── StorageError           external storage fails; a bad block is not an error, it ends a hit
    ├── TransportError         a transfer failed
    │   ├── PeerLostError          the other engine is gone
    │   └── HitLostError           a decode engine lacks a part of a hit that it was to have
    ├── BufferTooSmallError    a buffer request that can never be granted
    ├── EngineLostError        an engine died or stopped reporting
    │   └── SchedulerLostError     the scheduler died; the state of its engines is unknown
    ├── DeadlineError          something took longer than its deadline
    └── IncompatibleError      two components disagree on version, model or layout
        └── EngineRefusedError     an engine may not join

Every message names the value, the limit and the remedy.  In a message ``{name}`` is a placeholder
for a setting: the code that shows the error replaces it by the user's spelling: a flag, a variable
or a key of a file.
"""

import re
from collections.abc import Mapping

_SETTING = re.compile(r"\{([a-z][a-z0-9_]*)\}")


class DualPathError(Exception):
    """Base of everything dualpath raises on purpose."""

    def __str__(self) -> str:
        """Return the message with settings as plain names."""
        return self.spelled({})

    def spelled(self, spellings: Mapping[str, str]) -> str:
        """Return the message; ``spellings`` maps names of settings to the user's spelling."""
        text = super().__str__()
        return _SETTING.sub(lambda found: spellings.get(found[1], found[1]), text)


class ConfigError(DualPathError):
    """A setting is invalid; nothing has been started."""


class BadRequestError(DualPathError):
    """A client's request cannot be served as asked."""


class PromptTooLongError(BadRequestError):
    """A prompt has more tokens than a setting, the model or the engines allow."""


class TurnedAwayError(DualPathError):
    """The request was not started; it may be served later."""


class DrainingError(TurnedAwayError):
    """The router finishes its requests and accepts no new ones; the next router will."""


class OverloadedError(TurnedAwayError):
    """More requests at once than the router accepts; send it again after ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TraceError(DualPathError):
    """A workload trace is malformed."""


class StorageError(DualPathError):
    """External storage cannot be used."""


class TransportError(DualPathError):
    """A transfer failed; its destination holds undefined bytes."""


class PeerLostError(TransportError):
    """The engine at the other end of a transfer is gone."""


class HitLostError(TransportError):
    """A part of a hit is not where the attempt needs it, and the next attempt does without.

    A DE could not load the whole hit behind which it was to compute the append, or the PE could not
    load what a third DE was to serve.
    """


class BufferTooSmallError(DualPathError):
    """A reservation exceeds the whole buffer and could never be granted."""


class EngineLostError(DualPathError):
    """An engine died or stopped reporting."""


class SchedulerLostError(EngineLostError):
    """A front end's scheduler died or is unreachable; which of its engines live is unknown."""


class DeadlineError(DualPathError):
    """A deadline passed."""


class IncompatibleError(DualPathError):
    """Two components disagree on version, model or layout."""


class EngineRefusedError(IncompatibleError):
    """An engine may not join; ``reason`` is a one-word cause for metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
