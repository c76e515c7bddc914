"""Two S3 servers for tests: one in this process with injectable faults, and rclone's."""

import contextlib
import re
import shutil
import sysconfig
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs

from dualpath.storage.s3_client import S3Location, parse_location
from dualpath_lab.nodes.s3_server import S3Server, serve_folder

#: Fault of one request: an error status, a connection closed before or during the response, no
#: response, a response one byte at a time, or one that announces 10^20 bytes and ends before.
Fault = int | Literal["closed", "cut", "silent", "dripping", "endless"]

BUCKET = "blocks"
RCLONE = shutil.which("rclone") or shutil.which("rclone", path=sysconfig.get_path("scripts"))
_KEYS = {"AWS_ACCESS_KEY_ID": "dualpath-test", "AWS_SECRET_ACCESS_KEY": "a secret of the tests"}
_DRIP_S = 0.01


class FaultyS3:
    """Objects in a dict behind HTTP: the part of S3 that storage uses.

    ``faults``: for each method what goes wrong with its next requests for blocks, in order; None
    is no fault.  ``requests`` are those for blocks, as (method, name).  ``signers`` are the names
    of the keys by which requests were signed.  ``conditional``: whether ``If-None-Match`` is
    honoured.
    """

    def __init__(self, conditional: bool = True) -> None:
        self.objects: dict[str, bytes] = {}
        self.faults: dict[str, list[Fault | None]] = {}
        self.requests: list[tuple[str, str]] = []
        self.signers: list[str] = []
        self.conditional = conditional
        self.page_names = 1000
        self.ended = threading.Event()
        self.before: Callable[[str, str], None] = lambda method, name: None
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def location(self) -> S3Location:
        """The location of its bucket."""
        return location_at(self.url)

    def note(self, method: str, name: str) -> Fault | None:
        """Count a request and return its fault."""
        if not name.endswith(".kv"):
            return None
        self.before(method, name)
        with self._lock:
            self.requests.append((method, name))
            planned = self.faults.get(method)
            return planned.pop(0) if planned else None

    def put(self, name: str, content: bytes, only_new: bool) -> bool:
        """Store an object, unless the write is conditional and it exists."""
        with self._lock:
            if only_new and self.conditional and name in self.objects:
                return False
            self.objects[name] = content
            return True

    def listing(self, asked: dict[str, list[str]]) -> bytes:
        """Return a page of a listing, of ``page_names`` names."""
        prefix, delimiter = asked.get("prefix", [""])[0], asked.get("delimiter", [""])[0]
        with self._lock:
            names = sorted(name for name in self.objects if name.startswith(prefix))
            sizes = {name: len(self.objects[name]) for name in names}
        if delimiter:
            heads = (name[len(prefix) :].partition(delimiter) for name in names)
            names = sorted({f"{prefix}{head}{slash}" for head, slash, _ in heads if slash})
        start = int(asked.get("continuation-token", ["0"])[0])
        page = names[start : start + self.page_names]
        end = start + len(page)
        found = [
            f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"
            if delimiter
            else f"<Contents><Key>{name}</Key><Size>{sizes[name]}</Size>"
            "<LastModified>2026-11-22T10:00:00.000Z</LastModified></Contents>"
            for name in page
        ]
        more = (
            f"<IsTruncated>true</IsTruncated><NextContinuationToken>{end}</NextContinuationToken>"
            if end < len(names)
            else "<IsTruncated>false</IsTruncated>"
        )
        space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
        return f"<ListBucketResult {space}>{''.join(found)}{more}</ListBucketResult>".encode()

    def close(self) -> None:
        """Stop the server and all delayed responses."""
        self.ended.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def _handler(server: FaultyS3) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def handle_one_request(self) -> None:
            with contextlib.suppress(ConnectionError):
                super().handle_one_request()

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self.serve()

        def do_HEAD(self) -> None:
            self.serve()

        def do_PUT(self) -> None:
            self.serve()

        def do_DELETE(self) -> None:
            self.serve()

        def serve(self) -> None:
            name = self.path.removeprefix(f"/{BUCKET}/")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = server.note(self.command, name)
            if fault == "closed":
                self.close_connection = True
            elif fault == "silent":
                self.close_connection = True
                server.ended.wait()
            elif isinstance(fault, int):
                self.answer(fault, b"<Error><Code>Planned</Code><Message>no</Message></Error>")
            elif not self.path.startswith(f"/{BUCKET}/"):
                self.answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
            elif "Signature=" not in self.headers.get("Authorization", ""):
                self.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
            else:
                signer = re.findall(r"Credential=([^/]+)/", self.headers["Authorization"])
                server.signers.append(signer[0])
                self.do(name, body, fault)

        def do(self, name: str, body: bytes, fault: Fault | None) -> None:
            if self.command == "PUT":
                only_new = self.headers.get("If-None-Match") == "*"
                self.answer(200 if server.put(name, body, only_new) else 412, b"")
            elif self.command == "DELETE":
                server.objects.pop(name, None)
                self.answer(204, b"")
            elif name.startswith("?") and "list-type=2" in name:
                self.answer(200, server.listing(parse_qs(name[1:])))
            elif name not in server.objects:
                self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            else:
                self.answer(200, server.objects[name], fault)

        def answer(self, status: int, content: bytes, fault: Fault | None = None) -> None:
            self.send_response(status)
            if status != 204:
                announced = 10**20 if fault == "endless" else len(content)
                self.send_header("Content-Length", str(announced))
            self.end_headers()
            if self.command == "HEAD" or status == 204:
                return
            if fault in ("cut", "endless"):
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
            elif fault == "dripping":
                self.close_connection = True
                for byte in content:
                    self.wfile.write(bytes([byte]))
                    if server.ended.wait(_DRIP_S):
                        return
            else:
                self.wfile.write(content)

    return Handler


def location_at(endpoint: str) -> S3Location:
    """Return the tests' bucket on a server."""
    return parse_location(f"s3://{BUCKET}/tests?endpoint_url={endpoint}", _KEYS)


@contextlib.contextmanager
def rclone_s3(folder: Path) -> Iterator[S3Location]:
    """Serve a folder with rclone during the ``with`` block."""
    assert RCLONE is not None
    (folder / BUCKET).mkdir()
    server = S3Server(
        program=RCLONE,
        access_key_id=_KEYS["AWS_ACCESS_KEY_ID"],
        secret_access_key=_KEYS["AWS_SECRET_ACCESS_KEY"],
    )
    with serve_folder(server, folder) as url:
        yield location_at(url)
