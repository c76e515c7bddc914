"""A bucket as an ``ObjectTree``."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import TypeVar
from xml.etree import ElementTree

from dualpath.core.errors import StorageError
from dualpath.storage.objects import ObjectInfo
from dualpath.storage.s3_client import S3Client, S3Error

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
        return self._storage_errors(
            lambda: not self._client.exists(name) and self._client.put(name, [content])
        )

    def replace(self, name: str, content: bytes) -> None:
        """Put."""
        self._storage_errors(lambda: self._client.put(name, [content], only_new=False))

    def get(self, name: str, max_bytes: int | None = None) -> bytes | None:
        """Get, with ``max_bytes`` a range."""
        return self._storage_errors(lambda: self._client.get(name, max_bytes))

    def remove(self, names: Sequence[str]) -> int:
        """Delete in parallel."""
        with ThreadPoolExecutor(_PARALLEL_REMOVALS, "storage-remove") as pool:
            list(
                pool.map(
                    lambda name: self._storage_errors(lambda: self._client.delete(name)), names
                )
            )
        return len(names)

    def folders(self, prefix: str) -> list[str]:
        """List with a delimiter."""
        return sorted(
            name.removesuffix("/").rpartition("/")[2]
            for page in self._pages(prefix, "/")
            for name in _texts(page, "CommonPrefixes", "Prefix")
        )

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """List page by page."""
        for page in self._pages(prefix, ""):
            fields = [_texts(page, "Contents", name) for name in ("Key", "Size", "LastModified")]
            for name, size, written in zip(*fields, strict=True):
                below = name[len(self._client.list_prefix("")) :]
                yield ObjectInfo(below, int(size), datetime.fromisoformat(written).timestamp())

    def _pages(self, prefix: str, delimiter: str) -> Iterator[ElementTree.Element]:
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
