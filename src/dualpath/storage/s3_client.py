"""A minimal S3 client: the six requests that storage needs, over plain HTTP.

Responses go from the socket straight into the caller's memory.  That, a deadline on every step and
no further dependency are why no client library is used; see ``dualpath.storage.s3``.
"""

import contextlib
import hashlib
import hmac
import http.client
import importlib
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.extras import extra
from dualpath.node.secret_file import secret_variable
from dualpath.node.sockets import IDLE_CONNECTION_S

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

# ------------------------------------------------------------------------------------ s3 signature
# AWS Signature Version 4 of a request, the only part of S3 that is not plain HTTP; no I/O.

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


# ------------------------------------------------------------------------------------- s3 location
# The location and credentials of a bucket, from a URL and the AWS environment variables.

_DEFAULT_REGION = "us-east-1"
_PARAMETERS = ("endpoint_url", "region", "addressing_style")
_STYLES = ("path", "virtual")
#: Ends the names of Amazon's directory buckets.
_DIRECTORY_BUCKET = "--x-s3"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
#: Domains of Amazon's partitions by prefixes of their regions, as in botocore's partitions.json.
_DOMAINS = (
    ("cn-", "amazonaws.com.cn"),
    ("eusc-", "amazonaws.eu"),
    ("us-iso-", "c2s.ic.gov"),
    ("us-isob-", "sc2s.sgov.gov"),
    ("us-isof-", "csp.hci.ic.gov"),
    ("eu-isoe-", "cloud.adc-e.uk"),
)


class S3Location(msgspec.Struct, frozen=True, kw_only=True):
    """The location of objects: ``scheme://host:port``, then ``base`` before each object's name.

    ``base`` is percent-encoded, begins and ends with a slash and has bucket (unless it is in
    ``host``) and prefix; ``bucket_path`` is the part of it before the prefix.  ``credentials``
    returns valid credentials, which may change over time; None: requests are not signed.
    """

    url: str
    scheme: str
    host: str
    port: int
    base: str
    bucket_path: str
    region: str
    credentials: Callable[[], Credentials] | None = None

    @property
    def host_header(self) -> str:
        """The header ``Host``: with the port unless it is the scheme's default."""
        standard = {"http": 80, "https": 443}[self.scheme]
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == standard else f"{host}:{self.port}"


def parse_location(url: str, environment: Mapping[str, str] = os.environ) -> S3Location:
    """Return the location named by ``s3://bucket/prefix?endpoint_url=…&region=…``.

    Parameters override ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``, ``AWS_REGION`` and
    ``AWS_DEFAULT_REGION``.  The default endpoint is Amazon's in the region.  ``addressing_style``
    puts the bucket's name into the ``path`` (the default with an endpoint, and for names with dots,
    which Amazon's certificates do not cover) or, ``virtual``, into the host name.  Credentials are
    read from ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY`` and ``AWS_SESSION_TOKEN`` only, as
    URLs are logged.

    Raises ``ConfigError`` for a malformed URL or environment, and for a directory bucket.
    """
    parts = urlsplit(url)
    if parts.fragment or url.endswith("#"):
        raise ConfigError(f"storage {url!r} has a #, which ends a URL's path; write %23")
    if parts.netloc.endswith(_DIRECTORY_BUCKET):
        raise ConfigError(
            f"storage {url!r} is a directory bucket (S3 Express), which needs another protocol; "
            "give a general purpose bucket"
        )
    if parts.scheme != "s3" or ".." in parts.netloc or not _BUCKET.fullmatch(parts.netloc):
        raise ConfigError(
            f"storage {parts.scheme}://{parts.netloc} is not s3://BUCKET/PREFIX; give a bucket "
            "name of 3 to 63 lowercase letters, digits, dots and hyphens"
        )
    given = _parameters(parts.query)
    region = (
        given.get("region")
        or environment.get("AWS_REGION")
        or environment.get("AWS_DEFAULT_REGION")
        or _DEFAULT_REGION
    )
    if not re.fullmatch(r"[A-Za-z0-9-]+", region):
        raise ConfigError(f"S3 region is {region!r}; give a name such as eu-central-1")
    endpoint = (
        given.get("endpoint_url")
        or environment.get("AWS_ENDPOINT_URL_S3")
        or environment.get("AWS_ENDPOINT_URL")
        or ""
    )
    bucket = parts.netloc
    style = given.get("addressing_style") or ("path" if endpoint or "." in bucket else "virtual")
    own = f"https://s3.{region}.{_domain(region)}"
    scheme, host, port, folder = _endpoint(endpoint or own)
    if style == "virtual":
        if not re.search(r"[a-z]", host, re.I) or ":" in host:
            raise ConfigError(
                f"addressing_style is virtual, and the S3 endpoint {endpoint!r} has an address in "
                "place of a name; give addressing_style=path"
            )
        host = f"{bucket}.{host}"
    else:
        folder = f"{folder}/{bucket}"
    prefix = quote(unquote(parts.path).strip("/"), safe="/-._~")
    return S3Location(
        url=f"s3://{bucket}/{prefix}",
        scheme=scheme,
        host=host,
        port=port,
        base=f"{folder}/{prefix}/" if prefix else f"{folder}/",
        bucket_path=f"{folder}/",
        region=region,
        credentials=_credentials(environment),
    )


def _domain(region: str) -> str:
    """Return the domain of Amazon's hosts in a region: partitions such as China have their own."""
    own = (domain for prefix, domain in _DOMAINS if region.startswith(prefix))
    return next(own, "amazonaws.com")


def _parameters(query: str) -> dict[str, str]:
    given = dict(parse_qsl(query, keep_blank_values=True))
    unknown = [name for name in given if name not in _PARAMETERS]
    if unknown:
        raise ConfigError(
            f"storage parameter {unknown[0]!r} is none of {', '.join(_PARAMETERS)}; correct it, "
            "and give credentials as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
        )
    empty = [name for name, value in given.items() if not value]
    if empty:
        raise ConfigError(f"storage parameter {empty[0]!r} has no value; give one or leave it out")
    style = given.get("addressing_style", "path")
    if style not in _STYLES:
        raise ConfigError(f"addressing_style is {style!r}, must be one of {', '.join(_STYLES)}")
    return given


def _endpoint(url: str) -> tuple[str, str, int, str]:
    """Return scheme, host, port and folder."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"S3 endpoint {url!r} is not a URL ({error}); correct it") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"S3 endpoint {url!r} must be http://HOST:PORT or https://HOST")
    if parts.username or parts.password:
        raise ConfigError("the S3 endpoint holds credentials; set AWS_ACCESS_KEY_ID instead")
    default = 80 if parts.scheme == "http" else 443
    return parts.scheme, parts.hostname, port or default, parts.path.rstrip("/")


def _credentials(environment: Mapping[str, str]) -> Callable[[], Credentials] | None:
    access = secret_variable("AWS_ACCESS_KEY_ID", environment) or ""
    secret = secret_variable("AWS_SECRET_ACCESS_KEY", environment) or ""
    if not access and not secret:
        return None
    if not access or not secret:
        raise ConfigError(
            "only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set; set both or none"
        )
    keys = Credentials(access, secret, environment.get("AWS_SESSION_TOKEN", ""))
    return lambda: keys


# ----------------------------------------------------------------------------------- s3 connection
# An HTTP connection with a deadline on every step.


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts and retries of requests; all times are seconds above 0.

    ``connect_s``: to connect.  ``stall_s``: without a byte.  ``request_s``: for one request with
    all its ``attempts`` (at least 1).  ``pause_s``: before the second attempt, doubled before each
    further one.
    """

    connect_s: float = 5.0
    stall_s: float = 10.0
    request_s: float = 60.0
    attempts: int = 3
    pause_s: float = 0.1


class _TimedSocket(socket.socket):
    """A socket that times out when no byte moves for ``stall_s``, and at ``deadline_s``."""

    deadline_s: float
    stall_s: float

    def recv_into(self, buffer: "WriteableBuffer", nbytes: int = 0, flags: int = 0) -> int:
        _arm(self)
        return super().recv_into(buffer, nbytes, flags)

    def sendall(self, data: "ReadableBuffer", flags: int = 0) -> None:
        _send_all(self, data)


class _TimedTlsSocket(ssl.SSLSocket):
    """The same over TLS."""

    deadline_s: float
    stall_s: float

    def recv_into(
        self, buffer: "WriteableBuffer", nbytes: int | None = None, flags: int = 0
    ) -> int:
        _arm(self)
        return super().recv_into(buffer, nbytes, flags)

    def sendall(self, data: "ReadableBuffer", flags: int = 0) -> None:
        _send_all(self, data)


def _send_all(timed: _TimedSocket | _TimedTlsSocket, data: "ReadableBuffer") -> None:
    # In pieces: the timeout of socket.sendall applies to all of the data.
    left = memoryview(data).cast("B")
    while left:
        _arm(timed)
        left = left[timed.send(left) :]


def _arm(timed: _TimedSocket | _TimedTlsSocket) -> None:
    left_s = timed.deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("deadline of the request passed")
    timed.settimeout(min(left_s, timed.stall_s))


class Connection(http.client.HTTPConnection):
    """A connection to ``location``; it is opened by the first request.

    ``deadline_s`` (of ``time.monotonic``) is set before each request.
    """

    deadline_s: float
    sock: _TimedSocket | _TimedTlsSocket

    def __init__(
        self, location: S3Location, retry_policy: RetryPolicy, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(location.host, location.port)
        self._retry_policy = retry_policy
        self._tls = tls

    @property
    def is_open(self) -> bool:
        """Whether it is open, as far as this side knows."""
        return self.sock is not None

    def connect(self) -> None:
        """Open the connection; raises ``OSError``."""
        left_s = max(self.deadline_s - time.monotonic(), 0.001)
        plain = socket.create_connection(
            (self.host, self.port), min(left_s, self._retry_policy.connect_s)
        )
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                self.sock = _TimedSocket(
                    plain.family, plain.type, plain.proto, fileno=plain.detach()
                )
            else:
                wrapped = self._tls.wrap_socket(plain, server_hostname=self.host)
                assert isinstance(wrapped, _TimedTlsSocket)
                self.sock = wrapped
        except BaseException:
            plain.close()
            raise
        self.sock.stall_s = self._retry_policy.stall_s
        self.set_deadline(self.deadline_s)

    def set_deadline(self, deadline_s: float) -> None:
        """Set the deadline of all following steps."""
        self.deadline_s = deadline_s
        if self.is_open:
            self.sock.deadline_s = deadline_s


def tls_context(scheme: str) -> ssl.SSLContext | None:
    """Return the TLS context of https, with the system's certificates; None for http."""
    if scheme != "https":
        return None
    context = ssl.create_default_context()
    context.sslsocket_class = _TimedTlsSocket
    return context


def fill(receive: Callable[[memoryview], int], parts: list[memoryview], wanted: int) -> int:
    """Receive up to ``wanted`` bytes into ``parts``, one after the other; return how many."""
    done = 0
    for part in parts:
        place = part[: wanted - done]
        while place:
            received = receive(place)
            if not received:
                return done
            done += received
            place = place[received:]
    return done


# ---------------------------------------------------------------------------------- s3 credentials
# S3 credentials: the keys of the environment, else those that botocore finds.
#
# botocore reads AWS profiles and the roles of machines and containers, and renews keys that expire.
# It is optional: without it requests are signed with the environment's keys or not at all.

#: Variables that name a source of keys which only botocore can read.
_SOURCES = (
    "AWS_PROFILE",
    "AWS_ROLE_ARN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def with_credentials(
    location: S3Location, environment: Mapping[str, str] = os.environ
) -> S3Location:
    """Return the location with botocore's credentials unless it has its own.

    If botocore finds none, requests are not signed.  Raises ``ConfigError`` if ``environment``
    names a source of keys that needs botocore and it is not installed or cannot read the source.
    """
    if location.credentials is not None:
        return location
    try:
        session = importlib.import_module("botocore.session")
    except ImportError as error:
        named = [name for name in _SOURCES if environment.get(name)]
        if named:
            raise ConfigError(
                f"{named[0]} is set, and reading S3 keys from there needs botocore; "
                f"{extra('s3').remedy}, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from error
        return location
    try:
        found = session.get_session().get_credentials()
    except Exception as error:  # botocore's errors have no common base but this one
        raise ConfigError(
            f"botocore cannot find S3 keys ({error}); correct the profile, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error
    if found is None:
        return location
    return msgspec.structs.replace(location, credentials=_renewed(found))


def _renewed(found: Any) -> Callable[[], Credentials]:  # noqa: ANN401 - a library without types
    """Return a function that returns valid keys, or raises ``ConnectionError``."""

    def current() -> Credentials:
        try:
            keys = found.get_frozen_credentials()
        except Exception as error:  # as above; the request is tried again
            raise ConnectionError(f"S3 keys could not be renewed: {error}") from error
        return Credentials(keys.access_key, keys.secret_key, keys.token or "")

    return current


_RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)
_ERROR_TEXT_BYTES = 1 << 16
#: Longest response that is read as a whole: lists, and objects that are no blocks.
_WHOLE_BYTES = 1 << 32
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
        # With each, when it became idle, in seconds of ``time.monotonic``.
        self._idle: list[tuple[Connection, float]] = []

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
            return None if response.status == 404 else _content(response, max_bytes)

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
        return self._request("GET", "", _content, query=query)

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
                self._idle.pop()[0].close()

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
            connection, since_s = self._idle.pop()
        except IndexError:
            return Connection(self.location, self._retry_policy, self._tls)
        if time.monotonic() - since_s > IDLE_CONNECTION_S:
            connection.close()
            self.close()  # The others have been idle for longer.
            return Connection(self.location, self._retry_policy, self._tls)
        return connection

    def _release(self, connection: Connection, response: http.client.HTTPResponse) -> None:
        """Reuse a connection if its response has been read to the end, else close it."""
        if not response.length:
            response.read()
        if response.isclosed() and not response.will_close:
            self._idle.append((connection, time.monotonic()))
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


def _content(response: http.client.HTTPResponse, max_bytes: int | None = None) -> bytes:
    """Return the first bytes of a response, or all; a server may announce any length."""
    if max_bytes is None and (response.length or 0) > _WHOLE_BYTES:
        raise ConnectionError(
            f"response of {response.length} bytes, at most {_WHOLE_BYTES} are read; check that "
            "the address is that of an S3 server"
        )
    return response.read(max_bytes)


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
