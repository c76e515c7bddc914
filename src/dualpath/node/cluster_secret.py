"""The cluster's secret: authenticates and encrypts the control connection.

Both sides derive the keys of CurveZMQ (Curve25519, XSalsa20, Poly1305; part of libzmq) from one
shared secret.  The router accepts only the engines' key and an engine only the router's; every
message is encrypted and authenticated, and a nonce per connection and message prevents replay.
Without a secret the connection is plain and limited to the loopback address.
"""

import hmac
import ipaddress
import os
import secrets
from collections.abc import Mapping
from typing import Any

import zmq
from zmq.utils import z85

from dualpath.core.addresses import tcp_address
from dualpath.core.errors import ConfigError
from dualpath.node.secret_file import read_secret

SECRET_VARIABLE = "DUALPATH_CLUSTER_SECRET"
#: 128 bits in hexadecimal digits; the keys are only as hard to guess as the secret.
MIN_SECRET_CHARACTERS = 32

_REMEDY = (
    f"create a secret with `openssl rand -hex 32`; give the same one to router and engines in a "
    f"file ({{cluster_secret_file}}) or in {SECRET_VARIABLE}"
)


class ClusterSecret:
    """Keys of the control connection, derived from the secret ``text`` of router and engines.

    Raises ``ConfigError`` for a secret that is too short; ``origin`` (file or variable) is named
    in the error.
    """

    def __init__(self, text: str, origin: str) -> None:
        if len(text) < MIN_SECRET_CHARACTERS:
            raise ConfigError(
                f"the cluster secret in {origin} has {len(text)} characters, must have at least "
                f"{MIN_SECRET_CHARACTERS}; {_REMEDY}"
            )
        self._router_public, self._router_secret = _key_pair(text, b"router")
        self._engine_public, self._engine_secret = _key_pair(text, b"engine")

    def guard_listener(self, socket: "zmq.Socket[Any]") -> None:
        """Encrypt a socket before it is bound; clients must know the router's public key.

        Clients are authenticated over ZAP with ``callback``.
        """
        socket.curve_server = True
        socket.curve_publickey = self._router_public
        socket.curve_secretkey = self._router_secret

    def guard_connection(self, socket: "zmq.Socket[Any]") -> None:
        """Encrypt an engine's socket before it is connected; it accepts only the router."""
        socket.curve_serverkey = self._router_public
        socket.curve_publickey = self._engine_public
        socket.curve_secretkey = self._engine_secret

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a public key is the engines'; called by pyzmq's authenticator."""
        return hmac.compare_digest(key, self._engine_public)


def new_secret() -> str:
    """Return a random secret of 256 bits."""
    return secrets.token_hex(32)


def load_secret(file: str, environment: Mapping[str, str] = os.environ) -> ClusterSecret | None:
    """Return the secret in ``file``, else the environment's, else None.

    Raises ``ConfigError`` for an unreadable file and for a secret that is too short.
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
            f"control address {host!r} is reachable from other machines, and there is no cluster "
            "secret: anyone who reaches it could pose as an engine; use 127.0.0.1 or ::1, or "
            f"{_REMEDY}"
        )


def check_control_url(url: str, secret: ClusterSecret | None) -> None:
    """As ``check_control_host`` for the address that an engine connects to."""
    try:
        check_control_host(tcp_address(url).host, secret)
    except ValueError as error:
        raise ConfigError(f"control address {url!r}: {error}") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on ``host``; False for names but localhost.

    Other names are not resolved, as their address may change.
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _key_pair(text: str, end: bytes) -> tuple[bytes, bytes]:
    """Return the (public, secret) key pair of one side in libzmq's text form."""
    derived = hmac.digest(text.encode(), b"dualpath control connection, " + end, "sha256")
    secret_key = z85.encode(derived)
    return zmq.curve_public(secret_key), secret_key
