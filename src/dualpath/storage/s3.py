"""Full Blocks as objects of an S3 bucket: the same bytes under the same names as files.

A PUT is atomic, so a block is visible either completely or not at all.  Reads go from the socket
straight into the caller's (registered) memory.

The client is our own (``s3_client``, over the standard library's ``http.client``): measured against
one server it used 0.4 to 0.8 of the CPU seconds per GB of obstore, boto3 and NIXL's OBJ plugin, at
obstore's rate and above the others' (``lab/dualpath_lab/benchmarks/s3_read.py``), because it copies
bytes once less. Every step has a deadline.  Credentials: ``s3_credentials``.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar
from xml.etree import ElementTree

import msgspec

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin, StoreNamespace
from dualpath.core.errors import ConfigError, StorageError
from dualpath.storage import block_file
from dualpath.storage.block_file import HEADER_BYTES, FileOrder
from dualpath.storage.compression import Compressor
from dualpath.storage.contract import (
    ReadOutcome,
    WriteOutcome,
    all_written,
    check_destination,
    check_sources,
    run_origins,
)
from dualpath.storage.objects import ObjectInfo, checked_name
from dualpath.storage.posix import is_folder_name, is_object_name, namespace_name, object_name
from dualpath.storage.s3_client import RetryPolicy, S3Client, S3Error, S3Location
from dualpath.storage.sealed_blocks import block_codec

if TYPE_CHECKING:
    from dualpath.storage.sealed_blocks import KeyRing

# -------------------------------------------------------------------------------------- s3 objects
# A bucket as an ``ObjectTree``.

_PARALLEL_REMOVALS = 8
Answer = TypeVar("Answer")


class S3Objects:
    """See ``dualpath.storage.objects.ObjectTree``; needs the same permissions as ``S3Storage``.

    On a server without conditional writes, ``create`` may succeed in two processes.
    """

    def __init__(self, client: S3Client) -> None:
        self._client = client

    def create(self, name: str, content: bytes) -> bool:
        """Put if the object does not exist."""
        checked_name(name)
        return self._storage_errors(
            lambda: not self._client.exists(name) and self._client.put(name, [content])
        )

    def replace(self, name: str, content: bytes) -> None:
        """Put."""
        checked_name(name)
        self._storage_errors(lambda: self._client.put(name, [content], only_new=False))

    def get(self, name: str, max_bytes: int | None = None) -> bytes | None:
        """Get, with ``max_bytes`` a range."""
        checked_name(name)
        return self._storage_errors(lambda: self._client.get(name, max_bytes))

    def remove(self, names: Sequence[str]) -> int:
        """Delete in parallel."""
        with ThreadPoolExecutor(_PARALLEL_REMOVALS, "storage-remove") as pool:
            list(
                pool.map(
                    lambda name: self._storage_errors(lambda: self._client.delete(name)),
                    [checked_name(name) for name in names],
                )
            )
        return len(names)

    def folders(self, prefix: str) -> list[str]:
        """List with a delimiter."""
        found = (
            name.removesuffix("/").rpartition("/")[2]
            for page in self._pages(prefix, "/")
            for name in _texts(page, "CommonPrefixes", "Prefix")
        )
        return sorted(filter(is_folder_name, found))

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """List page by page."""
        for page in self._pages(prefix, ""):
            fields = [_texts(page, "Contents", name) for name in ("Key", "Size", "LastModified")]
            for name, size, written in zip(*fields, strict=True):
                below = name[len(self._client.list_prefix("")) :]
                # Keys of other programs, and those that a proxy would resolve to another path.
                if not (below.startswith(prefix) and is_object_name(below)):
                    continue
                yield ObjectInfo(below, int(size), datetime.fromisoformat(written).timestamp())

    def _pages(self, prefix: str, delimiter: str) -> Iterator[ElementTree.Element]:
        checked_name(prefix)
        token = ""
        while True:
            asked = {"delimiter": delimiter, "continuation-token": token}
            text = self._storage_errors(lambda: self._client.listing(prefix, asked))  # noqa: B023 - called now
            try:
                page = ElementTree.fromstring(text)
            except ElementTree.ParseError as error:
                raise StorageError(
                    f"listing of {prefix!r} is not XML: {error}; check the server"
                ) from error
            yield page
            following = _texts(page, "NextContinuationToken")
            if not following or _texts(page, "IsTruncated") != ["true"]:
                return
            token = following[0]

    def _storage_errors(self, do: Callable[[], Answer]) -> Answer:
        try:
            return do()
        except S3Error as error:
            raise StorageError(f"{error}; check the bucket's permissions and server") from error


def _texts(page: ElementTree.Element, *path: str) -> list[str]:
    """Return the texts of the elements at a path, in any XML namespace."""
    return [found.text or "" for found in page.findall("/".join(f"{{*}}{name}" for name in path))]


logger = logging.getLogger(__name__)

_PARALLEL_WRITES = 4
#: More would find the end of a chain in fewer round trips, but with more requests.
_PARALLEL_LOOKUPS = 4
_REMEDY = "check endpoint, credentials, and permissions to get, put, delete and list"
_REMEDIES = {"NoSuchBucket": "create the bucket"}
Result = TypeVar("Result")


class S3Storage:
    """See ``dualpath.storage.contract.BlockStorage``.

    It needs the bucket's permissions to get, put, delete and list: without the last, S3 answers
    403 for a missing object.

    Raises ``ConfigError`` if the bucket cannot be used or holds another namespace of this name, or
    if its blocks are sealed and ``keys`` is None.  ``compressor`` compresses written blocks.
    """

    def __init__(
        self,
        location: S3Location,
        namespace: StoreNamespace,
        *,
        retry_policy: RetryPolicy | None = None,
        keys: "KeyRing | None" = None,
        compressor: Compressor | None = None,
    ) -> None:
        self.parallel_lookups = _PARALLEL_LOOKUPS
        self.namespace = namespace
        self.geometry = namespace.geometry
        self._codec = block_codec(namespace, keys, compressor)
        self._order = FileOrder(namespace.geometry)
        self._folder = namespace_name(namespace)
        self.client = S3Client(location, retry_policy or RetryPolicy())
        _claim(self.client, f"{self._folder}/namespace.json", namespace)
        self._reports = block_file.AbsentReports()
        self._writing = _Writing()
        self._writers = ThreadPoolExecutor(_PARALLEL_WRITES, "storage-write")

    def object_name(self, key: BlockKey) -> str:
        """Return the name of a block's object, relative to the location."""
        return object_name(self._folder, key)

    def is_stored(self, key: BlockKey) -> bool:
        """Return whether the block's object exists; see the contract."""
        name = self.object_name(key)
        try:
            if self._codec.has_keys:
                header = self.client.get(name, HEADER_BYTES)
                return header is not None and self._unreadable(name, header) is None
            return self.client.exists(name)
        except S3Error as error:
            raise StorageError(
                f"cannot check whether {name} is stored: {error}; check the bucket's permissions "
                "and server"
            ) from error

    def read(self, key: BlockKey, destination: memoryview, *, whole: bool = True) -> ReadOutcome:
        """Read and verify a block; a corrupt one is removed so that it can be written again."""
        flat = check_destination(self.geometry, destination)
        header = memoryview(bytearray(HEADER_BYTES))
        payload = self._order.of(flat, whole=whole)
        first_bytes = self._codec.first_bytes(payload)
        parts = block_file.first_of([header, *payload.buffers], HEADER_BYTES + first_bytes)
        name = self.object_name(key)
        wire_bytes = 0
        try:
            received = self.client.get_into(name, parts, all_of_it=whole)
            arrived_bytes = max((received or 0) - HEADER_BYTES, 0)
            if block_file.needs_more(header, payload, first_bytes, arrived_bytes):
                wire_bytes = arrived_bytes
                received = self.client.get_into(name, [header, *payload.buffers], all_of_it=whole)
        except S3Error as error:
            logger.warning("read failed: %s", error)
            return ReadOutcome(wire_bytes, f"read error: {error}")
        if received is None:
            return ReadOutcome(wire_bytes, block_file.MISSING)
        payload_bytes = max(received - HEADER_BYTES, 0)
        wire_bytes += payload_bytes
        verifier = self._codec.verifier(payload)
        reason = block_file.defect_of_length(verifier, key, header, payload, payload_bytes)
        if reason in block_file.UNREADABLE_HERE:
            self._reports.absent(name, reason)
        elif reason is not None:
            self._discard(name, reason)
        return ReadOutcome(wire_bytes, reason)

    def write(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> WriteOutcome:
        """Persist new blocks in parallel; see the contract."""
        flat = check_sources(self.geometry, keys, sources)
        return all_written(
            _finish(
                [
                    self._writers.submit(self._write_one, *block)
                    for block in zip(keys, flat, run_origins(keys, origin), strict=True)
                ]
            )
        )

    def used(self, key: BlockKey) -> None:
        """Do nothing: this backend does not evict."""

    def close(self) -> None:
        """Wait for pending requests, then stop the threads; idempotent."""
        self._writers.shutdown(wait=True, cancel_futures=True)
        self.client.close()

    def _unreadable(self, name: str, header: bytes) -> str | None:
        """Return why this process cannot read a stored block, None if it may be able to."""
        reason = self._codec.unreadable(header)
        if reason is not None:
            self._reports.absent(name, reason)
        return reason

    def _discard(self, name: str, reason: str) -> None:
        logger.warning("removing corrupt block %s (%s)", name, reason)
        try:
            self.client.delete(name)
        except S3Error as error:
            logger.warning("cannot remove corrupt block %s: %s", name, error)

    def _write_one(
        self, key: BlockKey, source: memoryview, origin: BlockOrigin
    ) -> tuple[bool, int]:
        """Return whether the block is new, and its payload bytes as it is stored."""
        with self._writing.alone(key):
            name = self.object_name(key)
            try:
                replaces = False
                if self.client.exists(name):
                    header = self.client.get(name, HEADER_BYTES)
                    replaces = header is not None and self._unreadable(name, header) is not None
                    if not replaces:
                        return False, block_file.payload_bytes_of(header or b"", source.nbytes)
                content = self._codec.encoded(key, self._order.of(source), origin)
                is_new = self.client.put(name, content, only_new=not replaces)
            except S3Error as error:
                raise StorageError(
                    f"write of {HEADER_BYTES + source.nbytes} bytes refused: {error}; check the "
                    "bucket's permissions, quota and server"
                ) from error
            return is_new, sum(part.nbytes for part in content[1:])


class _Writing:
    """A lock per key being written, for servers without conditional writes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._keys: set[BlockKey] = set()

    @contextlib.contextmanager
    def alone(self, key: BlockKey) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: key not in self._keys)
            self._keys.add(key)
        try:
            yield
        finally:
            with self._changed:
                self._keys.discard(key)
                self._changed.notify_all()


def _finish(futures: Sequence["Future[Result]"]) -> list[Result]:
    """Wait for all futures, so that no buffer is in use afterwards; return the results.

    After a failure those that have not begun are cancelled: what refuses one write will refuse
    the others, each after the upload of a block.  The error is raised.
    """
    over, _ = wait(futures, return_when=FIRST_EXCEPTION)
    failed = next((one.exception() for one in over if one.exception() is not None), None)
    if failed is not None:
        for future in futures:
            future.cancel()
        wait(futures)
        raise failed
    return [future.result() for future in futures]


def _claim(client: S3Client, name: str, namespace: StoreNamespace) -> None:
    """Write the description of the namespace unless there is one, and compare."""
    url = client.location.url
    try:
        content = client.get(name)
        if content is None:
            client.put(name, [msgspec.json.format(msgspec.json.encode(namespace), indent=2)])
            content = client.get(name)
        if content is None:
            raise ConfigError(f"{url} does not store what is written; check the server")
        found = msgspec.json.decode(content, type=StoreNamespace)
    except S3Error as error:
        raise ConfigError(
            f"storage {url} cannot be used ({error}); {_REMEDIES.get(error.code, _REMEDY)}"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{name} in {url} is not readable as a namespace ({error}); remove it or give another "
            "prefix"
        ) from error
    if found != namespace:
        raise ConfigError(f"{name} in {url} belongs to {found}, not to {namespace}; give another")
