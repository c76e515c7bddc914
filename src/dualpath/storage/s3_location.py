"""The location and credentials of a bucket, from a URL and the AWS environment variables."""

import os
import re
from collections.abc import Callable, Mapping
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.storage.s3_signature import Credentials

_DEFAULT_REGION = "us-east-1"
_PARAMETERS = ("endpoint_url", "region", "addressing_style")
_STYLES = ("path", "virtual")


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
    puts the bucket's name into the ``path`` (the default with an endpoint) or, ``virtual``, into
    the host name.  Credentials are read from ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY`` and
    ``AWS_SESSION_TOKEN`` only, as URLs are logged.

    Raises ``ConfigError`` for a malformed URL or environment.
    """
    parts = urlsplit(url)
    if parts.scheme != "s3" or not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", parts.netloc):
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
    endpoint = (
        given.get("endpoint_url")
        or environment.get("AWS_ENDPOINT_URL_S3")
        or environment.get("AWS_ENDPOINT_URL")
        or ""
    )
    style = given.get("addressing_style") or ("path" if endpoint else "virtual")
    scheme, host, port, folder = _endpoint(endpoint or f"https://s3.{region}.amazonaws.com")
    bucket = parts.netloc
    if style == "virtual":
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


def _parameters(query: str) -> dict[str, str]:
    given = dict(parse_qsl(query))
    unknown = [name for name in given if name not in _PARAMETERS]
    if unknown:
        raise ConfigError(
            f"storage parameter {unknown[0]!r} is none of {', '.join(_PARAMETERS)}; correct it, "
            "and give credentials as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
        )
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
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError(f"S3 endpoint {url!r} must be http://HOST:PORT or https://HOST")
    if parts.username or parts.password:
        raise ConfigError("the S3 endpoint holds credentials; set AWS_ACCESS_KEY_ID instead")
    default = 80 if parts.scheme == "http" else 443
    return parts.scheme, parts.hostname, port or default, parts.path.rstrip("/")


def _credentials(environment: Mapping[str, str]) -> Callable[[], Credentials] | None:
    access = environment.get("AWS_ACCESS_KEY_ID", "")
    secret = environment.get("AWS_SECRET_ACCESS_KEY", "")
    if not access and not secret:
        return None
    if not access or not secret:
        raise ConfigError(
            "only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set; set both or none"
        )
    keys = Credentials(access, secret, environment.get("AWS_SESSION_TOKEN", ""))
    return lambda: keys
