"""Names for the weights of a running engine that a trainer changes, as part of KV's identity.

The weights that an engine has loaded are identified by the digest of their files.  Later weights
are not hashed: the update names them.  Their name is a *version*, a label of the trainer and 16
random hex digits that each training run draws anew, such as ``step-7-3f9c21d04be86a57``.  Labels
alone repeat in each run, and stored blocks outlive a run.
"""

import re
from typing import Annotated

import msgspec

from dualpath.core.errors import BadRequestError

#: The longest label.
MAX_LABEL = 64
_NONCE = "[0-9a-f]{16}"
_LABEL = f"[A-Za-z0-9._-]{{1,{MAX_LABEL}}}"
_VERSION = rf"\A{_LABEL}-{_NONCE}\Z"

#: The version of an engine's weights on the wire.
WeightsVersion = Annotated[str, msgspec.Meta(pattern=_VERSION)]

#: What messages call the weights that an engine has loaded when it started.
LOADED = "the weights it was started with"


def weights_version(label: str, nonce: str) -> str:
    """Return the version of a label with a nonce of 16 hex digits.

    Raises ``BadRequestError`` for a label of other characters, or too long a one.
    """
    if re.fullmatch(_LABEL, label) is None:
        raise BadRequestError(
            f"the label {label[:80]!r} of the weights must be 1 to {MAX_LABEL} letters, digits, "
            "dots, dashes and underscores; choose another one"
        )
    return checked_version(f"{label}-{nonce}")


def checked_version(text: str) -> str:
    """Return a version; raises ``BadRequestError`` if it is none."""
    if re.fullmatch(_VERSION, text) is None:
        raise BadRequestError(
            f"weight version {text[:100]!r} may be that of other weights in an earlier training "
            f"run, whose KV is still stored; name it LABEL-NONCE with 16 hex digits that the run "
            "draws once at random, such as step-7-3f9c21d04be86a57"
        )
    return text


def shown_version(version: str | msgspec.UnsetType) -> str:
    """Return a version for messages and reports."""
    return LOADED if version is msgspec.UNSET else f"weights {version}"
