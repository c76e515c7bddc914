"""S3 failures: reads end the run and never hang, look-ups raise, writes are refused."""

import functools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.guard import GUARD_S
from tests.s3_servers import BUCKET, Fault, FaultyS3, location_at
from tests.stored_runs import read_run, stored_head

from dualpath.core.blocks import BlockGeometry, BlockKey, StoreNamespace, block_keys
from dualpath.core.errors import ConfigError, StorageError
from dualpath.core.modes import Mode
from dualpath.launch.ports import claim_port
from dualpath.node.sockets import IDLE_CONNECTION_S
from dualpath.storage import s3_client
from dualpath.storage.factory import open_storage
from dualpath.storage.s3 import S3Storage
from dualpath.storage.s3_client import (
    Credentials,
    RetryPolicy,
    S3Client,
    S3Error,
    authorization,
    parse_location,
)

GEOMETRY = BlockGeometry.uniform(layers=2, block_tokens=1, layer_block_bytes=4096)
NAMESPACE = StoreNamespace("m", "float32", "NHD", GEOMETRY)
BLOCKS = 3
KEYS = block_keys(range(BLOCKS), 1)
DATA = [memoryview(bytes([i + 1]) * GEOMETRY.full_block_bytes) for i in range(BLOCKS)]
#: Retries without pause; a silent server times out soon, a slow one does not.
QUICK = RetryPolicy(connect_s=5.0, stall_s=0.2, request_s=5.0, attempts=3, pause_s=0.001)


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    running = FaultyS3()
    yield running
    running.close()


def stored(server: FaultyS3, retry_policy: RetryPolicy = QUICK) -> S3Storage:
    """A storage that holds the blocks and reads them one after the other."""
    storage = S3Storage(server.location, NAMESPACE, retry_policy=retry_policy)
    assert storage.write(KEYS, DATA).new == BLOCKS
    server.requests.clear()
    return storage


def destinations() -> list[memoryview]:
    return [memoryview(bytearray(GEOMETRY.full_block_bytes)) for _ in KEYS]


def test_an_object_of_any_announced_length_is_an_error_of_the_storage(server: FaultyS3) -> None:
    client = S3Client(server.location, QUICK)
    client.put("index.kv", [b"content"])
    server.faults["GET"] = ["endless"] * 3
    with pytest.raises(S3Error, match="100000000000000000000 bytes, at most"):
        client.get("index.kv")
    assert client.get("index.kv") == b"content"
    client.close()


def test_a_write_that_is_refused_uploads_no_further_blocks(server: FaultyS3) -> None:
    """The first failure ends the task: at most the uploads under way go on."""
    storage = S3Storage(server.location, NAMESPACE, retry_policy=QUICK)
    keys = block_keys(range(100), 1)
    server.faults["PUT"] = [403] * len(keys)
    with pytest.raises(StorageError, match="403"):
        storage.write(keys, [DATA[0]] * len(keys))
    assert sum(method == "PUT" for method, _ in server.requests) < 20
    storage.close()


# --- reads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [500, 503, 429, "closed", "cut", "silent", "endless"])
def test_a_read_that_fails_once_is_repeated(server: FaultyS3, fault: Fault) -> None:
    storage, into = stored(server), destinations()
    server.faults["GET"] = [None, fault]
    assert read_run(storage, KEYS, into).good_blocks == BLOCKS
    assert into == DATA
    assert len(server.requests) == BLOCKS + 1
    storage.close()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (500, "500 Planned no"),
        ("closed", "(attempt 3)"),
        ("cut", "response ended after"),
        ("silent", "timed out"),
    ],
)
def test_a_read_that_fails_repeatedly_ends_the_run_and_the_block_stays(
    server: FaultyS3, fault: Fault, message: str
) -> None:
    storage, into = stored(server), destinations()
    server.faults["GET"] = [None, fault, fault, fault]
    outcome = read_run(storage, KEYS, into)
    assert outcome.good_blocks == 1
    assert outcome.reason is not None
    assert outcome.reason.startswith("read error: GET ")
    assert message in outcome.reason
    assert into[0] == DATA[0]
    assert len(server.requests) == 1 + QUICK.attempts
    assert read_run(storage, KEYS, into).good_blocks == BLOCKS
    storage.close()


def test_a_slow_response_ends_at_the_deadline(server: FaultyS3) -> None:
    storage = stored(server, msgspec.structs.replace(QUICK, stall_s=5.0, request_s=0.3))
    server.faults["GET"] = ["dripping", "dripping", "dripping"]
    outcome = read_run(storage, KEYS, destinations())
    assert outcome.good_blocks == 0
    assert outcome.reason is not None
    assert "deadline" in outcome.reason or "timed out" in outcome.reason
    storage.close()


def test_a_refusal_is_not_repeated(server: FaultyS3) -> None:
    storage = stored(server)
    server.faults["GET"] = [403]
    assert "403 Planned" in str(read_run(storage, KEYS, destinations()).reason)
    assert len(server.requests) == 1
    storage.close()


def damage(server: FaultyS3, storage: S3Storage, key: BlockKey, content: bytes) -> None:
    server.objects[f"tests/{storage.object_name(key)}"] = content


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content, other: content[:-777], "short"),
        (lambda content, other: content[:100], "short"),
        (lambda content, other: b"", "short"),
        (lambda content, other: b"X" + content[1:], "bad header"),
        (lambda content, other: other, "wrong key"),
        (lambda content, other: content[:-1] + b"\0", "checksum"),
    ],
)
def test_a_damaged_object_is_removed_and_can_be_written_again(
    server: FaultyS3, change: Any, reason: str
) -> None:
    storage, into = stored(server), destinations()
    first, second = (server.objects[f"tests/{storage.object_name(key)}"] for key in KEYS[:2])
    damage(server, storage, KEYS[1], change(second, first))
    outcome = read_run(storage, KEYS, into)
    assert (outcome.good_blocks, outcome.reason) == (1, reason)
    assert stored_head(storage, KEYS) == 1
    assert storage.write(KEYS, DATA).new == 1
    assert read_run(storage, KEYS, into).good_blocks == BLOCKS
    assert into == DATA
    storage.close()


# --- look-ups ------------------------------------------------------------------------------------


def test_look_ups_are_under_way_together(server: FaultyS3) -> None:
    storage = stored(server)
    together = threading.Barrier(BLOCKS, timeout=GUARD_S)

    def wait_for_all(method: str, name: str) -> None:
        together.wait()

    server.before = wait_for_all
    with ThreadPoolExecutor(BLOCKS) as pool:
        assert list(pool.map(storage.is_stored, KEYS)) == [True] * BLOCKS
    assert [method for method, _ in server.requests] == ["HEAD"] * BLOCKS
    assert storage.parallel_lookups > 1
    storage.close()


def test_a_look_up_that_fails_once_is_retried_and_one_that_always_fails_raises(
    server: FaultyS3,
) -> None:
    storage = stored(server)
    server.faults["HEAD"] = [500, None, *[500] * QUICK.attempts]
    assert storage.is_stored(KEYS[0])
    with pytest.raises(StorageError, match=r"cannot check whether .* is stored: HEAD .*500"):
        storage.is_stored(KEYS[0])
    assert storage.is_stored(KEYS[0])
    storage.close()


# --- writes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [500, 409, "closed"])
def test_a_write_that_fails_once_is_repeated(server: FaultyS3, fault: Fault) -> None:
    storage = S3Storage(server.location, NAMESPACE, retry_policy=QUICK)
    server.faults["PUT"] = [fault]
    assert storage.write(KEYS, DATA).new == BLOCKS
    assert read_run(storage, KEYS, destinations()).good_blocks == BLOCKS
    storage.close()


def test_a_write_that_always_fails_is_refused_and_the_rest_is_visible(server: FaultyS3) -> None:
    storage = S3Storage(server.location, NAMESPACE, retry_policy=QUICK)
    assert storage.write(KEYS[:1], DATA[:1]).new == 1
    server.faults["PUT"] = [507]
    with pytest.raises(StorageError, match="507 Planned"):
        storage.write(KEYS[:2], DATA[:2])
    assert stored_head(storage, KEYS) == 1
    storage.close()


def test_a_server_without_conditional_writes_gets_unconditional_ones(server: FaultyS3) -> None:
    storage = S3Storage(server.location, NAMESPACE, retry_policy=QUICK)
    server.faults["PUT"] = [501]
    assert storage.write(KEYS, DATA).new == BLOCKS
    storage.close()


def test_a_block_written_meanwhile_by_another_engine_is_not_new(server: FaultyS3) -> None:
    client = S3Client(server.location, QUICK)
    assert client.put("a", [b"first"])
    assert not client.put("a", [b"second"])
    assert client.get("a") == b"first"
    client.close()


# --- opening -------------------------------------------------------------------------------------


def test_an_object_longer_than_requested_does_not_affect_the_next_response(
    server: FaultyS3,
) -> None:
    client = S3Client(server.location, QUICK)
    client.put("long", [b"x" * 100_000])
    client.put("next", [b"next"])
    part = memoryview(bytearray(10))
    assert client.get_into("long", [part]) == 10
    assert bytes(part) == b"x" * 10
    assert client.get("next") == b"next"
    client.close()


def test_a_connection_is_not_used_again_after_a_time_in_which_servers_close_it(
    server: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = S3Client(server.location, QUICK)
    used = []
    for idle_s in (0.0, 0.0, IDLE_CONNECTION_S + 1):
        now_s = time.monotonic() + idle_s
        clock = SimpleNamespace(monotonic=functools.partial(float, now_s), sleep=time.sleep)
        monkeypatch.setattr(s3_client, "time", clock)
        assert not client.exists("absent")
        used.append(client._idle[-1][0])
    assert used[1] is used[0]
    assert used[2] is not used[0]
    client.close()


def test_an_unreachable_server_is_reported_immediately() -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        S3Storage(location_at(f"http://127.0.0.1:{claim_port()}"), NAMESPACE, retry_policy=QUICK)


def test_a_missing_bucket_and_wrong_credentials_are_reported(server: FaultyS3) -> None:
    other = f"s3://other?endpoint_url={server.url}"
    with pytest.raises(ConfigError, match="create the bucket"):
        S3Storage(parse_location(other, {}), NAMESPACE, retry_policy=QUICK)
    unsigned = f"s3://{BUCKET}?endpoint_url={server.url}"
    with pytest.raises(ConfigError, match=r"AccessDenied.*credentials"):
        S3Storage(parse_location(unsigned, {}), NAMESPACE, retry_policy=QUICK)


def test_a_prefix_of_another_namespace_is_refused(server: FaultyS3) -> None:
    storage = stored(server)
    name = next(name for name in server.objects if name.endswith("namespace.json"))
    server.objects[name] = server.objects[name].replace(b'"m"', b'"n"')
    with pytest.raises(ConfigError, match="belongs to"):
        S3Storage(server.location, NAMESPACE, retry_policy=QUICK)
    server.objects[name] = b"{"
    with pytest.raises(ConfigError, match="not readable as a namespace"):
        S3Storage(server.location, NAMESPACE, retry_policy=QUICK)
    storage.close()


def test_the_setting_opens_it(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    storage = open_storage(f"s3://{BUCKET}/kv", NAMESPACE)
    assert isinstance(storage, S3Storage)
    assert storage.write(KEYS, DATA).new == BLOCKS
    assert all(name.startswith("kv/m_") for name in server.objects)
    storage.close()
    with pytest.raises(ConfigError, match="give a directory"):
        open_storage(f"s3://{BUCKET}/kv", NAMESPACE, mode=Mode.ORACLE)


# --- location and signature ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "environment", "scheme", "host", "base"),
    [
        ("s3://kv1", {}, "https", "kv1.s3.us-east-1.amazonaws.com", "/"),
        ("s3://kv1/a/b/", {"AWS_REGION": "eu-x"}, "https", "kv1.s3.eu-x.amazonaws.com", "/a/b/"),
        ("s3://kv1/a b?region=r", {}, "https", "kv1.s3.r.amazonaws.com", "/a%20b/"),
        ("s3://kv1?endpoint_url=http://h:90", {}, "http", "h:90", "/kv1/"),
        ("s3://kv1/p", {"AWS_ENDPOINT_URL": "https://h/x/"}, "https", "h", "/x/kv1/p/"),
        (
            "s3://kv1?addressing_style=virtual",
            {"AWS_ENDPOINT_URL_S3": "http://h:80", "AWS_ENDPOINT_URL": "http://other"},
            *("http", "kv1.h", "/"),
        ),
        ("s3://kv1?endpoint_url=http://[::1]:9", {}, "http", "[::1]:9", "/kv1/"),
    ],
)
def test_url_and_environment_define_the_location(
    url: str, environment: dict[str, str], scheme: str, host: str, base: str
) -> None:
    found = parse_location(url, environment)
    assert (found.scheme, found.host_header, found.base) == (scheme, host, base)
    assert found.credentials is None


@pytest.mark.parametrize(
    ("url", "environment", "message"),
    [
        ("s3://UPPER", {}, "3 to 63"),
        ("s3://kv1?secret_access_key=x", {}, "AWS_SECRET_ACCESS_KEY in the environment"),
        ("s3://kv1?addressing_style=x", {}, "path, virtual"),
        ("s3://kv1?endpoint_url=h:90", {}, "http://HOST:PORT"),
        ("s3://kv1?endpoint_url=http://h:x", {}, "not a URL"),
        ("s3://kv1?endpoint_url=http://a:b@h", {}, "holds credentials"),
        ("s3://kv1", {"AWS_ACCESS_KEY_ID": "a"}, "set both or none"),
    ],
)
def test_invalid_locations_are_refused_by_name(
    url: str, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_location(url, environment)


def test_secrets_are_not_shown() -> None:
    keys = {"AWS_ACCESS_KEY_ID": "who", "AWS_SECRET_ACCESS_KEY": "hush"}
    location = parse_location("s3://kv1", keys)
    assert location.credentials is not None
    assert "who" in repr(location.credentials())
    assert "hush" not in repr(location.credentials()) + repr(location)


def test_the_signature_is_that_of_amazons_own_example() -> None:
    """ "GET Object" of the S3 manual, Signature Calculations for the Authorization Header."""
    headers = {
        "host": "examplebucket.s3.amazonaws.com",
        "range": "bytes=0-9",
        "x-amz-content-sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "x-amz-date": "20130524T000000Z",
    }
    keys = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    assert authorization("GET", "/test.txt", headers, keys, "us-east-1") == (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, "
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )
