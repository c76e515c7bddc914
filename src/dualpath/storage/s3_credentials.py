"""S3 credentials: the keys of the environment, else those that botocore finds.

botocore reads AWS profiles and the roles of machines and containers, and renews keys that expire.
It is optional: without it requests are signed with the environment's keys or not at all.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.extras import extra
from dualpath.storage.s3_location import S3Location
from dualpath.storage.s3_signature import Credentials

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
