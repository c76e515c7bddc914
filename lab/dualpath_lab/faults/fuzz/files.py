"""Malformed files: traces and settings."""

import bz2
import contextlib
import gzip
import io
import lzma
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from dualpath.core.blocks import BlockGeometry, StoreNamespace
from dualpath.core.errors import ConfigError, StorageError, TraceError
from dualpath.core.settings import Schema, build, from_environment, from_tables, layered
from dualpath.engine.settings import EngineSettings, parse_settings, read_settings_file
from dualpath.storage.block_file import (
    HEADER_BYTES,
    UNREADABLE_HERE,
    BlockCodec,
    FileOrder,
    PlainBlocks,
)
from dualpath.storage.posix import PosixStorage
from dualpath.workload.formats import read_trace
from dualpath_lab.faults.fuzz.inputs import Inputs

if TYPE_CHECKING:
    from dualpath.storage.sealed_blocks import KeyRing

TAKEN, REFUSED = "taken", "refused"


class FolderSubject:
    """A subject with a temporary folder, in memory if possible."""

    pid: int | None = None

    async def __aenter__(self) -> Self:
        memory = Path("/dev/shm")
        self._stack = contextlib.ExitStack()
        where = memory if memory.is_dir() else None
        name = tempfile.TemporaryDirectory(prefix="dualpath-fuzz-", dir=where)
        self._folder = Path(self._stack.enter_context(name))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


# ---------------------------------------------------------------------- traces

_CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "a.py"}]},
    {"role": "assistant", "content": "ls", "tool_calls": [{"id": "1", "function": {}}]},
    {"role": "exit", "content": "done"},
]
_SPAN = {
    "traceId": "5b8e",
    "spanId": "a1",
    "startTimeUnixNano": "1000000000",
    "endTimeUnixNano": 2000000000,
    "attributes": [
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "100"}},
        {"key": "gen_ai.usage.output_tokens", "value": {"intValue": 20}},
        {"key": "gen_ai.input.messages", "value": {"stringValue": '[{"role": "user"}]'}},
        {"key": "dualpath.block_ids", "value": {"arrayValue": {"values": [{"intValue": "7"}]}}},
    ],
}
_LINES: tuple[object, ...] = (
    {"session_id": "a", "rounds": [[5, 2], [3, 0]]},
    [[4, 1], [2, 7]],
    {"session_id": "a", "rounds": [{"prompt": 10, "append": 10, "context": 0, "gen": 4}]},
    {"session_id": "a", "messages": _CHAT, "turns": 1},
    {"timestamp": 3, "input_length": 700, "output_length": 2, "hash_ids": [4, 5]},
    {"session_id": "a", "messages": _CHAT[:2], "output_length": 2, "message_mode": "delta"},
    {
        "chat_id": 2,
        "parent_chat_id": -1,
        "timestamp": 1.5,
        "input_length": 40,
        "output_length": 3,
        "hash_ids": [7, 8],
    },
    {"session_id": "a", "timestamp": 1760428436442742, "input": "fix it", "output": "ls"},
    {"resourceSpans": [{"scopeSpans": [{"spans": [_SPAN]}]}]},
    {"messages": _CHAT, "info": {}, "trajectory_format": "x"},
    {
        "conversation_id": "a",
        "conversation_idx": 0,
        "messages": _CHAT[:2],
        "tools": [{"name": "bash"}],
        "target_output_tokens": 7,
        "simulated_tool_delay_ms_after": 3.0,
    },
    {
        "id": "w",
        "block_size": 4,
        "requests": [
            {"t": 0, "type": "n", "in": 10, "out": 3, "hash_ids": [[1, 2]], "think_time": 0.0},
            {
                "t": 1,
                "type": "subagent",
                "agent_id": "helper",
                "requests": [{"t": 0, "type": "n", "in": 5, "out": 1, "hash_ids": [9]}],
            },
        ],
    },
)
_TABLE = b"TIMESTAMP,ContextTokens,GeneratedTokens"
_TRACE_NAMES = (
    *("t.jsonl", "t.jsonl", "t.json", "t.jsonl.gz", "t.jsonl.xz", "t.tar", "t.tar.gz"),
    *("t.tgz", "t.zip", "t.whl", "t.csv", "t.jsonl.bz2", "t"),
)


class TraceSubject(FolderSubject):
    """``read_trace``, which must return sessions or raise ``TraceError``."""

    def input(self, inputs: Inputs) -> tuple[str, bytes, bool]:
        """Return a file's name, its bytes, and whether malformed lines are skipped."""
        valid = inputs.one_of(_LINES)
        lines = [inputs.json(valid) for _ in range(inputs.random.randrange(1, 4))]
        name = inputs.one_of(_TRACE_NAMES)
        if name.endswith(".csv"):
            lines = [_TABLE, *(inputs.damaged(b"2023-11-16 18:15:46,%d,3" % n) for n in (1, 700))]
        packed = _packed(name, b"\n".join(lines) + b"\n")
        broken = inputs.chance(0.3) if name.endswith("l") else inputs.chance(0.6)
        return name, inputs.damaged(packed) if broken else packed, inputs.chance(0.5)

    async def run_input(self, given: Any) -> str:  # noqa: ANN401 - what ``input`` returns
        """Read the file."""
        name, content, leaves_out = given
        path = self._folder / name
        path.write_bytes(content)
        try:
            read_trace(path, on_broken=(lambda error: None) if leaves_out else None)
        except TraceError:
            return REFUSED
        finally:
            path.unlink()
        return TAKEN

    async def still_works(self) -> None:
        """A valid line is read."""
        assert await self.run_input(("t.jsonl", msgspec.json.encode(_LINES[0]), False)) == TAKEN


def _packed(name: str, text: bytes) -> bytes:
    if name.endswith(".jsonl.gz"):
        return gzip.compress(text, 1)
    if name.endswith(".bz2"):
        return bz2.compress(text, 1)
    if name.endswith(".xz"):
        return lzma.compress(text, preset=0)
    if name.endswith((".zip", ".whl")):
        with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
            archive.writestr("traces/a.jsonl", text)
        return file.getvalue()
    if ".tar" in name or name.endswith(".tgz"):
        compressed = name.endswith("gz")
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w:gz" if compressed else "w") as tar:
            member = tarfile.TarInfo("traces/a.jsonl")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
        return file.getvalue()
    return text


# ---------------------------------------------------------------------- settings

_SETTINGS: dict[str, Any] = {
    "router": {"control_port": 5700, "mode": "dualpath", "api_keys": ["a"], "alpha_tokens": 10},
    "engine": {"role": "decode", "buffer_bytes": "1GiB", "snic_bytes_per_s": 1e9, "node": "n"},
    "cluster": {"model": "m", "storage": "kv", "nodes": "1P2D", "mode": "basic", "port": 1},
    "endpoint": {"model": "m", "port": 8000, "served_model_names": ["m"], "block_tokens": 64},
}
_ENGINE: dict[str, Any] = {
    **{
        "role": "decode",
        "engine_id": "d",
        "router": "tcp://127.0.0.1:5700",
        "api_url": "http://h:1",
    },
    **{"storage": "kv", "buffer_bytes": 1 << 30, "nixl_engine_config": {"A": "b"}},
}


class SettingsSubject(FolderSubject):
    """Settings files, environment variables and vLLM's extra config: settings or ``ConfigError``.

    ``schema`` has the sections that a file may contain.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def input(self, inputs: Inputs) -> tuple[str, Any]:
        """Return the kind of input and the input."""
        match inputs.random.randrange(3):
            case 0:
                valid = _toml(inputs.changed(_SETTINGS) if inputs.chance(0.5) else _SETTINGS)
                if inputs.chance(0.01):
                    valid = b"a = " + inputs.one_of((b"[", b"{x=")) * 10_000
                return "file", inputs.damaged(valid) if inputs.chance(0.5) else valid
            case 1:
                value = inputs.value()
                text = value if isinstance(value, str) else repr(value)
                section = inputs.one_of(sorted(_SETTINGS))
                names = [*self._schema[section].__struct_fields__, "no_such"]
                return "variable", (section, inputs.one_of(names), text)
        name = inputs.one_of(sorted(_ENGINE))  # vLLM accepts only a table here
        return "extra", {**_ENGINE, name: inputs.changed(_ENGINE[name])}

    async def run_input(self, given: Any) -> str:  # noqa: ANN401 - what ``input`` returns
        """Read it as commands and engines do."""
        way, what = given
        try:
            if way == "file":
                self._file(what)
            elif way == "variable":
                section, key, text = what
                name = f"DUALPATH_{section}_{key}".upper()
                found = layered(from_environment(self._schema, {name: text}))
                build(self._schema[section], section, found, {})
            else:
                parse_settings(what)
        except ConfigError:
            return f"{way} {REFUSED}"
        return f"{way} {TAKEN}"

    async def still_works(self) -> None:
        """An engine's valid settings are accepted."""
        assert isinstance(parse_settings(_ENGINE), EngineSettings)

    def _file(self, content: bytes) -> None:
        path = self._folder / "settings.toml"
        path.write_bytes(content)
        tables = read_settings_file(str(path))
        assert tables == tomllib.loads(content.decode())
        found = layered(from_tables(self._schema, tables, str(path)))
        for section in ("router", "endpoint", "cluster"):
            build(self._schema[section], section, found, {})


def _toml(tables: object) -> bytes:
    """Return TOML as far as possible: JSON's values are TOML's, except null."""
    text = b""
    for section, values in tables.items() if isinstance(tables, dict) else ():
        text += b"[%s]\n" % msgspec.json.encode(section)
        for key, value in values.items() if isinstance(values, dict) else ():
            text += msgspec.json.encode(key) + b" = " + msgspec.json.encode(value) + b"\n"
    return text


# ----------------------------------------------------------------------------------- stored blocks
# Malformed stored blocks, without sealing.

_NAMESPACE = StoreNamespace(
    model="fuzzed",
    dtype="float32",
    layout="none",
    geometry=BlockGeometry(4, ((512, 512), (1024,), (2048,)), layer_windows=(0, 8, 0)),
)
_ORDER = FileOrder(_NAMESPACE.geometry)


class BlockSubject(FolderSubject):
    """Stored blocks: a read may be good only if no byte of the block differs."""

    namespace = _NAMESPACE
    keys: "KeyRing | None" = None
    fields_bytes = 176

    def form(self, digest: str, inputs: Inputs) -> BlockCodec:
        """Return the codec with which an input is written."""
        return PlainBlocks(digest)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._storage = PosixStorage(self._folder, self.namespace, keys=self.keys)
        self._into = memoryview(bytearray(_NAMESPACE.geometry.full_block_bytes))
        return self

    def input(self, inputs: Inputs) -> tuple[bytes, bytes, bytes]:
        """Return the requested key, the payload written under it, and the file's bytes."""
        key = inputs.random.randbytes(32)
        payload = self.payload(inputs)
        other = inputs.random.randbytes(32) if inputs.chance(0.1) else key
        digest = "0" * 16 if inputs.chance(0.1) else self.namespace.digest()
        sections = _ORDER.of(memoryview(payload))
        whole = b"".join(self.form(digest, inputs).encoded(other, sections))
        match inputs.random.randrange(4):
            case 0:
                fields = inputs.damaged(whole[: self.fields_bytes])
                whole = fields + whole[len(fields) :]
            case 1:
                whole = inputs.damaged(whole)
            case 2:
                whole = whole[:HEADER_BYTES] + inputs.damaged(whole[HEADER_BYTES:])
        return key, payload, whole

    def payload(self, inputs: Inputs) -> bytes:
        """Return the payload of an input."""
        return inputs.random.randbytes(self._into.nbytes)

    async def run_input(self, given: Any) -> str:  # noqa: ANN401 - what ``input`` returns
        """Write the file and read the block."""
        key, payload, whole = given
        path = self._storage.block_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole)
        self._into[:] = bytes(self._into.nbytes)
        try:
            if self._storage.read(key, self._into, whole=False).is_good:
                arrived, right = (
                    _ORDER.of(memoryview(block), whole=False).buffers
                    for block in (self._into, payload)
                )
                assert arrived == right, "a wrong block without its window layers is good"
                outcome = self._storage.read(key, self._into)
            else:
                path.write_bytes(whole)
                outcome = self._storage.read(key, self._into)
                assert not outcome.is_good, "a block with a bad part was read as good"
        except StorageError as error:
            raise AssertionError("reading a bad block must not raise") from error
        if outcome.is_good:
            assert bytes(self._into) == payload, "a wrong block was read as good"
            path.unlink()
            return TAKEN
        stays = outcome.reason in UNREADABLE_HERE
        problem = "a block was removed" if stays else "a bad block was not removed"
        assert path.exists() == stays, problem
        path.unlink(missing_ok=True)
        return str(outcome.reason)

    async def still_works(self) -> None:
        """A block can be written and read."""
        key, payload = b"k" * 32, bytearray(b"p" * self._into.nbytes)
        assert self._storage.write([key], [memoryview(payload)]).new == 1
        assert self._storage.read(key, self._into).is_good
