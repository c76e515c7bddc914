"""The shape of an ASGI application, as far as our layers around one go."""

import gc
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def own_path(scope: Message) -> str:
    """Return the path as Starlette's routes see it: without the prefix a proxy leaves in it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def json_answer(status: int, body: bytes, *more: tuple[bytes, bytes]) -> tuple[Message, Message]:
    """Return the messages of a whole answer in JSON, with ``more`` headers."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *more,
    ]
    start = {"type": "http.response.start", "status": int(status), "headers": headers}
    return start, {"type": "http.response.body", "body": body}


async def send_all(send: Send, messages: Iterable[Message]) -> None:
    """Send the messages of a whole answer."""
    for message in messages:
        await send(message)


def adding_headers(send: Send, more: Callable[[], Iterable[tuple[bytes, bytes]]]) -> Send:
    """Return a ``send`` that adds headers to an answer; ``more`` is called when it begins."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *more()]
        await send(message)

    return sending


#: New objects before a collection of the youngest generation; such collections before one of the
#: middle generation; these before one of all objects.
THRESHOLDS = (1_000, 5, 2_000)


def collect_seldom() -> None:
    """Make Python's collector of cyclic garbage run rarely; call it before requests are served.

    By default it scans the youngest objects whenever there are 700 more of them, and all objects
    when there are a quarter more.  With 1,500 streams that was a fourth of a front end's CPU, and
    each full scan stopped its event loop for 0.2 s of CPU, since it visits each key of each
    prompt.  Nearly all objects of a request are freed without the collector, by reference counts.
    So full scans are rare, and others visit few objects at a time: a scan of the middle generation
    after 200,000 new objects took 0.1 s of CPU, after 5,000 a tenth of that, and all scans together
    the same.  Objects that exist at this call are never scanned again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
