"""Reads objects of a bucket through NIXL's plugin OBJ; other requests use our own client."""

from typing import Protocol
from urllib.parse import urlsplit

from dualpath.core.errors import ConfigError
from dualpath.storage.reading import ObjectReader
from dualpath.storage.s3_client import S3Client, S3Error
from dualpath.storage.s3_location import S3Location


class Getter(Protocol):
    """Reads objects: ``S3Client``, or a plugin."""

    def get_into(self, name: str, parts: list[memoryview], *, all_of_it: bool = True) -> int | None:
        """See ``S3Client.get_into``."""
        ...

    def close(self) -> None:
        """Release all resources; idempotent."""
        ...


class PluginGetter:
    """Reads the objects of ``client`` through a plugin; closes both."""

    def __init__(self, client: S3Client, reader: ObjectReader) -> None:
        self._client = client
        self._reader = reader

    def get_into(self, name: str, parts: list[memoryview], *, all_of_it: bool = True) -> int | None:
        """Ask for the size first: the plugin's error for a missing object is not specific."""
        size_bytes = self._client.size(name)
        if size_bytes is None:
            return None
        left_bytes, wanted = size_bytes, []
        for part in parts:
            wanted.append(part[:left_bytes])
            left_bytes -= wanted[-1].nbytes
        try:
            return self._reader.fill_from_object(self._client.list_prefix(name), wanted)
        except OSError as error:
            raise S3Error(f"GET {name}: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the plugin, then the client."""
        self._reader.close()
        self._client.close()


def plugin_parameters(location: S3Location) -> dict[str, str]:
    """Return the parameters of the plugin OBJ; it does not renew the credentials in them.

    Raises ``ConfigError`` for an endpoint with a path, which the plugin does not support.
    """
    bucket = urlsplit(location.url).netloc
    folder = location.bucket_path.strip("/")
    virtual = location.host.startswith(f"{bucket}.") and not folder
    if not virtual and folder != bucket:
        raise ConfigError(
            f"NIXL's plugin OBJ supports no path in an endpoint ({location.bucket_path}); give "
            "s3:// instead of nixl+obj://"
        )
    parameters = {
        **{"bucket": bucket, "region": location.region, "scheme": location.scheme},
        "use_virtual_addressing": str(virtual).lower(),
        # By default the SDK requires response checksums, which many servers do not send.
        **{"req_checksum": "required", "resp_checksum": "required"},
    }
    endpoint = location.host_header.removeprefix(f"{bucket}." if virtual else "")
    if not endpoint.endswith(".amazonaws.com"):
        parameters["endpoint_override"] = endpoint
    if location.credentials is not None:
        keys = location.credentials()
        parameters |= {"access_key": keys.access_key_id, "secret_key": keys.secret_access_key}
        if keys.session_token:
            parameters["session_token"] = keys.session_token
    return parameters
