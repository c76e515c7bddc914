"""S3 credentials: the environment's keys, else botocore's, else none."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tests.s3_servers import FaultyS3

from dualpath.core.errors import ConfigError
from dualpath.storage.s3_client import (
    RetryPolicy,
    S3Client,
    S3Error,
    S3Location,
    parse_location,
    with_credentials,
)


class FakeSession(ModuleType):
    """``botocore.session`` of a machine with a new pair of keys for every request."""

    def __init__(self, *, role: bool = True) -> None:
        super().__init__("botocore.session")
        self.renewals = 0
        self.error: Exception | None = None
        self._role = role

    def get_session(self) -> "FakeSession":
        return self

    def get_credentials(self) -> "FakeSession | None":
        return self if self._role else None

    def get_frozen_credentials(self) -> SimpleNamespace:
        if self.error is not None:
            raise self.error
        self.renewals += 1
        return SimpleNamespace(access_key=f"key-{self.renewals}", secret_key="s", token="t")


def install(monkeypatch: pytest.MonkeyPatch, session: FakeSession | None) -> None:
    """Replace botocore, or make it appear not installed."""
    monkeypatch.setitem(sys.modules, "botocore", ModuleType("botocore"))
    monkeypatch.setitem(sys.modules, "botocore.session", session)


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    server = FaultyS3()
    yield server
    server.close()


def unsigned(url: str = "http://localhost:1") -> S3Location:
    return parse_location(f"s3://blocks?endpoint_url={url}", {})


def test_keys_of_the_environment_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeSession())
    keys = {"AWS_ACCESS_KEY_ID": "mine", "AWS_SECRET_ACCESS_KEY": "hush"}
    found = with_credentials(parse_location("s3://blocks", keys))
    assert found.credentials is not None
    assert found.credentials().access_key_id == "mine"


def test_every_request_is_signed_with_current_keys(
    monkeypatch: pytest.MonkeyPatch, server: FaultyS3
) -> None:
    session = FakeSession()
    install(monkeypatch, session)
    location = with_credentials(unsigned(server.url))
    assert location.credentials is not None
    assert [location.credentials().access_key_id for _ in range(2)] == ["key-1", "key-2"]
    client = S3Client(location, RetryPolicy(attempts=1))
    assert client.put("one", [b"bytes"])
    assert session.renewals == 3
    session.error = RuntimeError("the machine's service is silent")
    with pytest.raises(S3Error, match="could not be renewed: the machine's service is silent"):
        client.get("one")
    client.close()


def test_without_keys_anywhere_requests_are_not_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeSession(role=False))
    assert with_credentials(unsigned(), {}).credentials is None
    install(monkeypatch, None)
    assert with_credentials(unsigned(), {}).credentials is None


def test_a_profile_without_botocore_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, None)
    with pytest.raises(ConfigError, match=r"AWS_PROFILE is set.*pip install 'botocore>=1.40'"):
        with_credentials(unsigned(), {"AWS_PROFILE": "agents"})


def test_botocore_itself_reads_a_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("botocore")
    file = tmp_path / "credentials"
    file.write_text("[agents]\naws_access_key_id = who\naws_secret_access_key = hush\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "agents")
    found = with_credentials(unsigned())
    assert found.credentials is not None
    assert found.credentials().access_key_id == "who"
    monkeypatch.setenv("AWS_PROFILE", "none-such")
    with pytest.raises(ConfigError, match="none-such"):
        with_credentials(unsigned())


#: A credential process of botocore: returns a new pair of keys per run, with a given validity.
KEY_PROCESS = """
import datetime, json, pathlib, sys
count = pathlib.Path(sys.argv[1])
number = len(count.read_bytes()) + 1
count.write_bytes(b"x" * number)
end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=int(sys.argv[2]))
if count.with_name("broken").exists():
    sys.exit("the vault is sealed")
print(json.dumps({"Version": 1, "AccessKeyId": f"key-{number}", "SecretAccessKey": "hush",
                  "SessionToken": "t", "Expiration": end.isoformat()}))
"""


def process_location(
    monkeypatch: pytest.MonkeyPatch, folder: Path, url: str, good_s: int
) -> S3Location:
    """Return a bucket with the keys of a profile with a ``credential_process``."""
    pytest.importorskip("botocore")
    program, config = folder / "keys.py", folder / "config"
    program.write_text(KEY_PROCESS)
    (folder / "count").write_bytes(b"")
    command = f"{sys.executable} {program} {folder / 'count'} {good_s}"
    config.write_text(f"[profile agents]\ncredential_process = {command}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))
    monkeypatch.setenv("AWS_PROFILE", "agents")
    return with_credentials(unsigned(url))


def test_keys_of_a_process_are_renewed_before_they_expire(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: FaultyS3
) -> None:
    location = process_location(monkeypatch, tmp_path, server.url, good_s=60)
    client = S3Client(location, RetryPolicy(attempts=1))
    assert client.put("one", [b"bytes"])
    assert client.get("one") == b"bytes"
    # Near their expiry botocore renews the keys for every request.
    assert len({*server.signers}) == 2
    (tmp_path / "broken").touch()
    with pytest.raises(S3Error, match=r"S3 keys could not be renewed.*the vault is sealed"):
        client.get("one")
    (tmp_path / "broken").unlink()
    assert client.get("one") == b"bytes"
    assert len({*server.signers}) == 3
    client.close()


def test_keys_of_a_process_serve_many_requests_while_they_are_good(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: FaultyS3
) -> None:
    location = process_location(monkeypatch, tmp_path, server.url, good_s=7200)
    client = S3Client(location, RetryPolicy(attempts=1))
    assert client.put("one", [b"bytes"])
    assert client.get("one") == b"bytes"
    assert server.signers == ["key-1", "key-1"]
    client.close()
