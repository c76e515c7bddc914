"""TLS contexts: which certificates clients accept, and which one a server shows."""

import ssl
from typing import Annotated

from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting

CaFile = Annotated[
    str,
    Setting(
        "PEM file of the authorities to trust at an https:// endpoint; empty: the system's",
        metavar="FILE",
    ),
]


CertFile = Annotated[
    str,
    Setting("PEM file of the HTTP server's certificate; empty: plain HTTP", metavar="FILE"),
]
KeyFile = Annotated[
    str,
    Setting("PEM file of the certificate's key; empty: it is in ssl_certfile", metavar="FILE"),
]


def serving(certificate_file: str, key_file: str) -> ssl.SSLContext | None:
    """Return the context of a server with a certificate, None for plain HTTP without one.

    The arguments are the settings ``ssl_certfile`` and ``ssl_keyfile``.  Raises ``ConfigError`` for
    a key without a certificate, and for files that cannot be used.
    """
    if not certificate_file:
        if key_file:
            raise ConfigError(
                f"{{ssl_keyfile}} is {key_file!r} and there is no {{ssl_certfile}}; give both, or "
                "none for plain HTTP"
            )
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # An empty password: a key with one is an error, not a question at the terminal.
        context.load_cert_chain(certificate_file, key_file or None, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{{ssl_certfile}} is {certificate_file!r} and {{ssl_keyfile}} {key_file!r}: "
            f"{error.strerror or error}; give a PEM certificate and its key, without a password"
        ) from error
    return context


def trusting(ca_file: str, setting: str = "ca_file") -> ssl.SSLContext:
    """Return the context of a client that trusts the authorities in ``ca_file``, or the system's.

    Raises ``ConfigError``, which names ``setting``, for a file without certificates.
    """
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{{{setting}}} is {ca_file!r}: {error.strerror or error}; give a PEM file with the "
            "certificates of the authorities to trust"
        ) from error


def trusting_only(certificate_file: str, key_file: str) -> ssl.SSLContext:
    """Return the context of a client that accepts one server's own certificate, under any name.

    It shows the same certificate to a server that asks clients for theirs.  Raises ``ConfigError``
    for unreadable files.
    """
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        # The certificate itself is trusted, not only the authority that issued it.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(certificate_file)
        context.load_cert_chain(certificate_file, key_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--ssl-certfile {certificate_file} and --ssl-keyfile {key_file}: "
            f"{error.strerror or error}; give a PEM certificate and its key"
        ) from error
    return context
