"""Storage keys: from a key file to sealed blocks, and refusals."""

import logging
import sys
from pathlib import Path

import pytest

from dualpath.cli.main import main
from dualpath.core.blocks import BlockGeometry, Protection, StoreNamespace, block_keys
from dualpath.core.errors import ConfigError
from dualpath.engine.control.surroundings import LIVE
from dualpath.engine.io.storage_maintenance import load_storage_keys
from dualpath.engine.settings import EngineSettings, parse_settings
from dualpath.storage.posix import namespace_name
from dualpath.storage.sealed_blocks import STORAGE_KEY_VARIABLE

GEOMETRY = BlockGeometry.uniform(layers=1, block_tokens=1, layer_block_bytes=512)
KEYS = block_keys([1], 1)
BLOCK = memoryview(bytes(range(256)) * 2)


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STORAGE_KEY_VARIABLE, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "storage.key"
    file.write_text("0" * 64)
    file.chmod(0o600)
    return file


def settings(**given: str) -> EngineSettings:
    basic = {"role": "decode", "engine_id": "de-0", "router": "tcp://127.0.0.1:1", "storage": "kv"}
    return parse_settings({"api_url": "http://127.0.0.1:2", **basic, **given})


def namespace(engine: EngineSettings) -> StoreNamespace:
    return StoreNamespace("m", "bf16", "none", GEOMETRY, protection=engine.protection)


@pytest.mark.parametrize(
    ("given", "protection"),
    [
        ({}, None),
        ({"storage_key_file": "f"}, Protection.ENCRYPTED),
        ({"storage_key_file": "f", "storage_protection": "none"}, None),
        ({"storage_protection": "authenticated"}, Protection.AUTHENTICATED),
        ({"storage_protection": "encrypted", "mode": "oracle"}, None),
    ],
)
def test_a_key_file_alone_means_encryption(
    given: dict[str, str], protection: Protection | None
) -> None:
    found = settings(**given)
    assert found.seals_blocks == (protection is not None)
    assert protection is None or found.protection is protection


def test_a_key_of_the_environment_means_encryption_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORAGE_KEY_VARIABLE, "0" * 64)
    assert settings().protection is Protection.ENCRYPTED
    assert not settings(storage_protection="none").seals_blocks


def test_blocks_of_other_protection_have_another_namespace() -> None:
    plain = StoreNamespace("m", "bf16", "none", GEOMETRY)
    named = [
        settings(storage_key_file="f"),
        settings(storage_protection="authenticated"),
        settings(),
    ]
    names = [namespace_name(namespace(engine)) for engine in named]
    assert len({*names}) == 3
    assert names[2] == namespace_name(plain) == "m_ddd8ccff7f5faf91"


def test_an_engine_seals_what_it_stores(tmp_path: Path, file: Path) -> None:
    engine = settings(storage=str(tmp_path / "kv"), storage_key_file=str(file))
    storage = LIVE.open_storage(engine, namespace(engine))
    storage.write(KEYS, [BLOCK])
    into = memoryview(bytearray(512))
    assert storage.read(KEYS[0], into).is_good
    assert into == BLOCK
    (stored,) = (tmp_path / "kv").glob("*/*/*/*.kv")
    assert bytes(BLOCK[:32]) not in stored.read_bytes()


def test_sealing_without_a_key_is_refused_with_a_remedy(tmp_path: Path) -> None:
    engine = settings(storage=str(tmp_path / "kv"), storage_protection="authenticated")
    with pytest.raises(
        ConfigError,
        match=r"no storage key; create a storage key with `openssl rand -hex 32`.*_key_file",
    ):
        LIVE.open_storage(engine, namespace(engine))


def test_a_file_that_cannot_be_read_or_is_open_to_all(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"storage_key_file 'absent' cannot be read.*openssl"):
        load_storage_keys("absent")
    assert load_storage_keys("") is None
    with caplog.at_level(logging.WARNING):
        load_storage_keys(str(file))
        assert caplog.text == ""
        file.chmod(0o644)
        load_storage_keys(str(file))
    assert "is open to every user of this machine (mode 644); chmod 600" in caplog.text


def test_without_the_library_keys_are_refused_with_what_to_install(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match="pip install 'cryptography>=46'"):
        load_storage_keys(str(file))


def test_serve_passes_the_file_to_its_engines(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--storage-key-file", str(file), "--storage-protection", "authenticated")
    assert main(["serve", "m", "--storage", "kv", *given, "--port", "0", "--dry-run"]) == 0
    router, *engines = capsys.readouterr().out.splitlines()
    assert str(file) not in router
    for command in engines:
        assert f'"storage_key_file": "{file}"' in command
        assert '"storage_protection": "authenticated"' in command
