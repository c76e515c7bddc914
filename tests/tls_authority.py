"""A certificate authority of a test, and its certificate for a server on loopback addresses."""

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

import pytest

_LASTS = datetime.timedelta(days=1)


class TlsFiles(NamedTuple):
    """PEM files: the authority, the server's certificate, and its key."""

    authority: str
    certificate: str
    key: str


def tls_files(folder: Path) -> TlsFiles:
    """Write the files into ``folder``; skips the test without the package ``cryptography``."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def certificate(
        subject: str, key: ec.EllipticCurvePrivateKey, issuer_key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _LASTS)
            .not_valid_after(now + _LASTS)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), False
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        )

    root_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    usage = x509.KeyUsage(*(False,) * 5, key_cert_sign=True, crl_sign=True, **_NO_ENCIPHERING)
    root = (
        certificate("authority", root_key, root_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .add_extension(usage, True)
        .sign(root_key, hashes.SHA256())
    )
    here = [x509.IPAddress(ipaddress.ip_address(a)) for a in ("127.0.0.1", "::1")]
    server = (
        certificate("server", server_key, root_key)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost"), *here]), False)
        .sign(root_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    files = {
        "authority": root.public_bytes(pem),
        "certificate": server.public_bytes(pem),
        "key": server_key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    }
    for file, content in files.items():
        (folder / f"{file}.pem").write_bytes(content)
    return TlsFiles(**{file: str(folder / f"{file}.pem") for file in files})


_NO_ENCIPHERING = {"encipher_only": False, "decipher_only": False}
