"""The cluster's secret: who may speak on the control connection, and where it may run without.

Both ends derive the keys of CurveZMQ (Curve25519, XSalsa20, Poly1305; part of libzmq) from one
secret text.  The router admits the engines' key alone and an engine the router's alone, every
message is encrypted and authenticated, and a nonce per connection and message keeps old ones from
being played again.  Without a secret the connection is plain and stays on the loopback address.
"""

import hmac
import ipaddress
import os
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from dualpath.core.errors import ConfigError
from dualpath.transport.secret_file import read_secret

SECRET_VARIABLE = "DUALPATH_CLUSTER_SECRET"
#: 128 bits in hexadecimal digits; the keys are as hard to guess as the secret, not harder.
LEAST_CHARACTERS = 32

_REMEDY = (
    f"`openssl rand -hex 32` makes a secret; give the same to router and engines in a file "
    f"(cluster_secret_file) or in {SECRET_VARIABLE}"
)


class ClusterSecret:
    """Keys of the control connection; ``text`` is what router and engines share.

    Raises ``ConfigError`` for a text that could be guessed; ``origin`` says where it is from.
    """

    def __init__(self, text: str, origin: str) -> None:
        if len(text) < LEAST_CHARACTERS:
            raise ConfigError(
                f"the cluster secret in {origin} has {len(text)} characters, at least "
                f"{LEAST_CHARACTERS} are needed; {_REMEDY}"
            )
        self._router_public, self._router_secret = _key_pair(text, b"router")
        self._engine_public, self._engine_secret = _key_pair(text, b"engine")

    def guard_listener(self, socket: "zmq.Socket[Any]") -> None:
        """Let a socket that is about to be bound speak to holders of the router's key only.

        Which of them may is asked over ZAP: ``callback``.
        """
        socket.curve_server = True
        socket.curve_publickey = self._router_public
        socket.curve_secretkey = self._router_secret

    def guard_connection(self, socket: "zmq.Socket[Any]") -> None:
        """Let a socket that is about to be connected speak to the router alone, as an engine."""
        socket.curve_serverkey = self._router_public
        socket.curve_publickey = self._engine_public
        socket.curve_secretkey = self._engine_secret

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a public key is the engines'; the signature is pyzmq's authenticator's."""
        return hmac.compare_digest(key, self._engine_public)


def new_secret() -> str:
    """Return a random secret of 256 bits."""
    return secrets.token_hex(32)


def load_secret(file: str, environment: Mapping[str, str] = os.environ) -> ClusterSecret | None:
    """Return the secret in ``file``, or else the environment's, or else None.

    Raises ``ConfigError`` for a file that cannot be read and a secret that could be guessed.
    """
    found = read_secret(
        file,
        setting="cluster_secret_file",
        variable=SECRET_VARIABLE,
        remedy=_REMEDY,
        environment=environment,
    )
    return None if found is None else ClusterSecret(*found)


def check_control_host(host: str, secret: ClusterSecret | None) -> None:
    """Raise ``ConfigError`` if control messages would leave this machine without a secret."""
    if secret is None and not is_loopback(host):
        raise ConfigError(
            f"control address {host!r} is open to other machines, and there is no cluster secret: "
            f"whoever reaches it could pose as an engine; use 127.0.0.1, or a secret: {_REMEDY}"
        )


def check_control_url(url: str, secret: ClusterSecret | None) -> None:
    """As ``check_control_host`` for the address that an engine connects to."""
    parts = urlsplit(url)
    if parts.scheme == "tcp":
        check_control_host(parts.hostname or "", secret)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on ``host``; a name other than localhost: no.

    What a name means may change between this look and the next.
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _key_pair(text: str, end: bytes) -> tuple[bytes, bytes]:
    """Return (public, secret) key of one end in libzmq's text form."""
    derived = hmac.digest(text.encode(), b"dualpath control connection, " + end, "sha256")
    secret_key = z85.encode(derived)
    return zmq.curve_public(secret_key), secret_key
