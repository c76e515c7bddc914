"""AWS Signature Version 4 of a request, the only part of S3 that is not plain HTTP; no I/O."""

import hashlib
import hmac
from collections.abc import Mapping

import msgspec

#: Instead of the payload's SHA-256: blocks have their own checksums, and a SHA-256 at a tenth of
#: memory speed would take longer than the transfer.
UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"
_ALGORITHM = "AWS4-HMAC-SHA256"


class Credentials(msgspec.Struct, frozen=True):
    """A key pair; ``session_token`` is empty unless the keys are temporary."""

    access_key_id: str
    secret_access_key: str
    session_token: str = ""

    def __repr__(self) -> str:
        return f"Credentials({self.access_key_id!r})"


def authorization(
    method: str, path: str, headers: Mapping[str, str], credentials: Credentials, region: str
) -> str:
    """Return the value of the header ``Authorization`` of a request.

    ``path``: percent-encoded, with the query if there is one, its parameters sorted.
    ``headers``: the headers to sign, names in lowercase; they include ``host``,
    ``x-amz-date`` (``YYYYMMDDTHHMMSSZ``) and ``x-amz-content-sha256``.
    """
    names = sorted(headers)
    signed = ";".join(names)
    lines = [f"{name}:{headers[name].strip()}" for name in names]
    place, _, query = path.partition("?")
    request = "\n".join(
        [method, place, query, *lines, "", signed, headers["x-amz-content-sha256"]]
    ).encode()
    when = headers["x-amz-date"]
    steps = (when[:8], region, "s3", "aws4_request")
    scope = "/".join(steps)
    text = "\n".join([_ALGORITHM, when, scope, hashlib.sha256(request).hexdigest()])
    key = b"AWS4" + credentials.secret_access_key.encode()
    for step in steps:
        key = hmac.digest(key, step.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    return (
        f"{_ALGORITHM} Credential={credentials.access_key_id}/{scope}, "
        f"SignedHeaders={signed}, Signature={signature}"
    )
