"""Full Blocks as objects of an S3 bucket: the same bytes under the same names as files.

A PUT is atomic, so a block is visible either completely or not at all.  Reads go from the socket
straight into the caller's (registered) memory.

The client is our own (``s3_client``, over the standard library's ``http.client``): measured against
one server it used 0.4 to 0.8 of the CPU seconds per GB of obstore, boto3 and NIXL's OBJ plugin, at
obstore's rate and above the others' (``benchmarks/s3_read.py``), because it copies bytes once less.
Every step has a deadline.  Credentials: ``s3_credentials``.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

import msgspec

from dualpath.core.blocks import UNKNOWN_ORIGIN, BlockKey, BlockOrigin, StoreNamespace
from dualpath.core.errors import ConfigError, StorageError
from dualpath.storage import block_file
from dualpath.storage.block_header import HEADER_BYTES
from dualpath.storage.checks import check_destination, check_sources, run_origins
from dualpath.storage.contract import ReadOutcome
from dualpath.storage.directory import namespace_name, object_name
from dualpath.storage.protection import block_codec
from dualpath.storage.reading import ObjectReader
from dualpath.storage.s3_client import S3Client, S3Error
from dualpath.storage.s3_connection import RetryPolicy
from dualpath.storage.s3_location import S3Location
from dualpath.storage.s3_plugin import Getter, PluginGetter, plugin_parameters
from dualpath.storage.sections import FileOrder

if TYPE_CHECKING:
    from dualpath.storage.key_ring import KeyRing

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

    ``open_reader`` opens a plugin that reads blocks, given its parameters.

    Raises ``ConfigError`` if the bucket cannot be used or holds another namespace of this name, or
    if its blocks are sealed and ``keys`` is None.
    """

    def __init__(
        self,
        location: S3Location,
        namespace: StoreNamespace,
        *,
        retry_policy: RetryPolicy | None = None,
        keys: "KeyRing | None" = None,
        open_reader: Callable[[Mapping[str, str]], ObjectReader] | None = None,
    ) -> None:
        self.parallel_lookups = _PARALLEL_LOOKUPS
        self.namespace = namespace
        self.geometry = namespace.geometry
        self._codec = block_codec(namespace, keys)
        self._order = FileOrder(namespace.geometry)
        self._folder = namespace_name(namespace)
        self.client = S3Client(location, retry_policy or RetryPolicy())
        self._getter: Getter = self.client
        if open_reader is not None:
            self._getter = PluginGetter(self.client, open_reader(plugin_parameters(location)))
        _claim(self.client, f"{self._folder}/namespace.json", namespace)
        self._writing = _Writing()
        self._writers = ThreadPoolExecutor(_PARALLEL_WRITES, "storage-write")

    def object_name(self, key: BlockKey) -> str:
        """Return the name of a block's object, relative to the location."""
        return object_name(self._folder, key)

    def is_stored(self, key: BlockKey) -> bool:
        """Return whether the block's object exists; see the contract."""
        name = self.object_name(key)
        try:
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
        buffers = [header, *payload.buffers]
        name = self.object_name(key)
        try:
            received = self._getter.get_into(name, buffers, all_of_it=whole)
        except S3Error as error:
            logger.warning("read failed: %s", error)
            return ReadOutcome(0, f"read error: {error}")
        if received is None:
            return ReadOutcome(0, block_file.MISSING)
        payload_bytes = max(received - HEADER_BYTES, 0)
        verifier = self._codec.verifier(payload)
        reason = block_file.defect_of_length(verifier, key, header, payload, payload_bytes)
        if reason in block_file.UNREADABLE_HERE:
            logger.warning("cannot read stored block %s (%s); it is not removed", name, reason)
        elif reason is not None:
            self._discard(name, reason)
        return ReadOutcome(payload_bytes, reason)

    def write(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        origin: BlockOrigin = UNKNOWN_ORIGIN,
    ) -> int:
        """Persist new blocks in parallel; see the contract."""
        flat = check_sources(self.geometry, keys, sources)
        return sum(
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
        self._getter.close()

    def _discard(self, name: str, reason: str) -> None:
        logger.warning("removing corrupt block %s (%s)", name, reason)
        try:
            self.client.delete(name)
        except S3Error as error:
            logger.warning("cannot remove corrupt block %s: %s", name, error)

    def _write_one(self, key: BlockKey, source: memoryview, origin: BlockOrigin) -> bool:
        with self._writing.alone(key):
            name = self.object_name(key)
            try:
                if self.client.exists(name):
                    return False
                content = self._codec.encoded(key, self._order.of(source), origin)
                is_new = self.client.put(name, content)
            except S3Error as error:
                raise StorageError(
                    f"write of {HEADER_BYTES + source.nbytes} bytes refused: {error}; check the "
                    "bucket's permissions, quota and server"
                ) from error
            return is_new


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
    """Wait for all futures, so that no buffer is in use afterwards; return the results."""
    wait(futures)
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
