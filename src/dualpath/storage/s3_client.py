"""A minimal S3 client: the six requests that storage needs, over plain HTTP.

Responses go from the socket straight into the caller's memory.  That, a deadline on every step and
no further dependency are why no client library is used; see ``dualpath.storage.s3``.
"""

import contextlib
import http.client
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeVar
from urllib.parse import quote, unquote

from dualpath.storage.s3_connection import Connection, RetryPolicy, fill, tls_context
from dualpath.storage.s3_location import S3Location
from dualpath.storage.s3_signature import UNSIGNED_PAYLOAD, authorization

_RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)
_ERROR_TEXT_BYTES = 1 << 16
Answer = TypeVar("Answer")


class S3Error(OSError):
    """S3 refused, or all attempts failed; ``status`` is 0 if there was no response."""

    def __init__(self, text: str, status: int = 0, code: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.code = code


class _TryAgainError(Exception):
    """A response that is worth a retry."""


class S3Client:
    """Objects under one ``S3Location``, by names relative to it; thread-safe.

    Names consist of letters, digits and ``/-._``.  All methods raise ``S3Error``.
    """

    def __init__(self, location: S3Location, retry_policy: RetryPolicy) -> None:
        self.location = location
        self._retry_policy = retry_policy
        self._tls = tls_context(location.scheme)
        self._conditional = True
        # A stack: the connection used last is the least likely to have been closed by the server.
        self._idle: list[Connection] = []

    def get_into(self, name: str, parts: list[memoryview], *, all_of_it: bool = True) -> int | None:
        """Fill ``parts`` from the beginning of an object; return the bytes received.

        Returns None if there is no such object.  ``all_of_it``: the object is expected to be no
        longer than ``parts``, so that no range is requested.
        """
        room = sum(part.nbytes for part in parts)

        def take(response: http.client.HTTPResponse) -> int | None:
            if response.status == 404:
                return None
            if response.status == 416:  # the object is empty
                return 0
            length = _length(response)
            wanted = min(length, room)
            received = fill(response.readinto, parts, wanted)
            if received < wanted:
                raise ConnectionError(f"response ended after {received} of {length} bytes")
            return received

        headers = {} if all_of_it else _first(room)
        return self._request("GET", name, take, missing_is_answer=True, headers=headers)

    def get(self, name: str, max_bytes: int | None = None) -> bytes | None:
        """Return a small object, or the first ``max_bytes`` of one; None if there is no object."""

        def take(response: http.client.HTTPResponse) -> bytes | None:
            if response.status == 416:
                return b""
            return None if response.status == 404 else response.read(max_bytes)

        wanted = {} if max_bytes is None else _first(max_bytes)
        return self._request("GET", name, take, missing_is_answer=True, headers=wanted)

    def list_prefix(self, prefix: str) -> str:
        """Return the prefix within the bucket of a ``prefix`` relative to the location."""
        bucket = self.location.bucket_path
        return unquote(self.location.base.removeprefix(bucket)) + prefix

    def listing(self, prefix: str, parameters: Mapping[str, str]) -> bytes:
        """Return one page of ``ListObjectsV2``, as XML; empty parameters are left out."""
        asked = {"list-type": "2", "prefix": self.list_prefix(prefix), **parameters}
        query = "&".join(
            f"{key}={quote(asked[key], safe='-._~')}" for key in sorted(asked) if asked[key]
        )
        return self._request("GET", "", lambda response: response.read(), query=query)

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes, None if there is no such object."""

        def take(response: http.client.HTTPResponse) -> int | None:
            if response.status == 404:
                return None
            length = response.getheader("Content-Length", "")
            if not length.isdecimal():
                raise ConnectionError("response without Content-Length")
            return int(length)

        return self._request("HEAD", name, take, missing_is_answer=True)

    def exists(self, name: str) -> bool:
        """Return whether the object exists."""
        return self._request("HEAD", name, lambda r: r.status != 404, missing_is_answer=True)

    def put(self, name: str, parts: Sequence[memoryview | bytes], *, only_new: bool = True) -> bool:
        """Store an object, with ``only_new`` only if it does not exist; return whether it was.

        Servers without conditional writes overwrite: check ``exists`` first.
        """

        def take(response: http.client.HTTPResponse) -> bool:
            if response.status == 409:
                # Another conditional write of the same object is in progress.
                raise _TryAgainError("conflict with another write")
            if response.status == 501:
                self._conditional = False
                raise _TryAgainError("server does not support conditional writes")
            return response.status != 412

        headers = {"If-None-Match": "*"} if only_new else {}
        return self._request("PUT", name, take, body=parts, headers=headers)

    def delete(self, name: str) -> None:
        """Remove an object; succeeds also if there is none."""
        self._request("DELETE", name, lambda response: None, missing_is_answer=True)

    def close(self) -> None:
        """Close idle connections; idempotent."""
        # Another thread may take the last connection in between.
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _request(
        self,
        method: str,
        name: str,
        take: Callable[[http.client.HTTPResponse], Answer],
        *,
        body: Sequence[memoryview | bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        query: str = "",
        missing_is_answer: bool = False,
    ) -> Answer:
        deadline_s = time.monotonic() + self._retry_policy.request_s
        pause_s = self._retry_policy.pause_s
        attempt = 0
        while True:
            attempt += 1
            connection = self._connection(fresh=attempt > 1)
            connection.set_deadline(deadline_s)
            try:
                self._send(connection, method, self._path(name, query), body, headers or {})
                response = connection.getresponse()
                self._check(response, method, name, missing_is_answer)
                answer = take(response)
                self._release(connection, response)
                return answer
            except S3Error:
                connection.close()
                raise
            except (OSError, http.client.HTTPException, _TryAgainError) as error:
                connection.close()
                late = time.monotonic() + pause_s >= deadline_s
                if late or attempt >= self._retry_policy.attempts:
                    text = str(error) or type(error).__name__
                    raise S3Error(
                        f"{self._description(method, name)}: {text} (attempt {attempt})"
                    ) from error
            time.sleep(pause_s)
            pause_s *= 2

    def _connection(self, *, fresh: bool) -> Connection:
        """Return a connection; ``fresh`` (after a failure) closes idle ones, which may be dead."""
        if fresh:
            self.close()
        try:
            return self._idle.pop()
        except IndexError:
            return Connection(self.location, self._retry_policy, self._tls)

    def _release(self, connection: Connection, response: http.client.HTTPResponse) -> None:
        """Reuse a connection whose response has been read to its end, else close it."""
        if not response.length:
            response.read()
        if response.isclosed() and not response.will_close:
            self._idle.append(connection)
        else:
            connection.close()

    def _path(self, name: str, query: str = "") -> str:
        """Return the path of the request: of an object, or with a query of the bucket."""
        return f"{self.location.bucket_path}?{query}" if query else self.location.base + name

    def _description(self, method: str, name: str) -> str:
        return f"{method} {self._path(name)} at {self.location.host_header}"

    def _send(
        self,
        connection: Connection,
        method: str,
        path: str,
        body: Sequence[memoryview | bytes] | None,
        more: Mapping[str, str],
    ) -> None:
        headers = self._signed(method, path)
        if body is not None:
            headers["Content-Length"] = str(sum(len(part) for part in body))
            headers["Content-Type"] = "application/octet-stream"
        headers |= {n: v for n, v in more.items() if self._conditional or n != "If-None-Match"}
        connection.request(method, path, body=body, headers=headers)

    def _signed(self, method: str, path: str) -> dict[str, str]:
        location = self.location
        headers = {"host": location.host_header}
        if location.credentials is None:
            return headers
        credentials = location.credentials()
        headers["x-amz-content-sha256"] = UNSIGNED_PAYLOAD
        headers["x-amz-date"] = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        if credentials.session_token:
            headers["x-amz-security-token"] = credentials.session_token
        headers["authorization"] = authorization(
            method, path, headers, credentials, location.region
        )
        return headers

    def _check(
        self,
        response: http.client.HTTPResponse,
        method: str,
        name: str,
        missing_is_answer: bool,
    ) -> None:
        status = response.status
        if status in (200, 201, 204, 206) or (status == 404 and missing_is_answer):
            return
        if (method == "PUT" and status in (409, 412, 501)) or (method == "GET" and status == 416):
            return
        text = response.read(_ERROR_TEXT_BYTES).decode(errors="replace")
        code = _element(text, "Code")
        message = " ".join(
            filter(None, (str(status), code or response.reason, _element(text, "Message")))
        )
        if status in _RETRIED_STATUSES:
            raise _TryAgainError(message)
        raise S3Error(f"{self._description(method, name)}: {message}", status, code)


def _first(count: int) -> dict[str, str]:
    """Return the range header of an object's first bytes."""
    return {"Range": f"bytes=0-{count - 1}"}


def _length(response: http.client.HTTPResponse) -> int:
    """Return the object's length; it is required to detect a closed connection."""
    if response.length is None:
        raise ConnectionError("response without Content-Length")
    return response.length


def _element(xml: str, name: str) -> str:
    """Return the text of an element of S3's error documents, or an empty string."""
    found = re.search(rf"<{name}>([^<]*)</{name}>", xml)
    return found[1] if found else ""
