"""Storage read through NIXL's plugins: the same blocks as without, and clear refusals."""

import os
from pathlib import Path

import pytest
from tests.s3_servers import RCLONE, rclone_s3

from dualpath.core.blocks import BlockGeometry, StoreNamespace, block_keys
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.engine.control.surroundings import LIVE
from dualpath.engine.settings import parse_settings
from dualpath.storage.contract import BlockStorage
from dualpath.storage.factory import FILE_PLUGINS, open_storage, open_tree
from dualpath.storage.posix import PosixStorage
from dualpath.storage.s3 import S3Storage, plugin_parameters
from dualpath.storage.s3_client import parse_location

GEOMETRY = BlockGeometry(16, ((3072,), (1024,), (3072,)), (0, 32, 0))
NAMESPACE = StoreNamespace("m", "bf16", "none", GEOMETRY)
KEYS = block_keys(range(48), 16)
BLOCKS = [memoryview(os.urandom(GEOMETRY.full_block_bytes)) for _ in KEYS]


def opened(location: str) -> BlockStorage:
    """Open it as an engine does."""
    basic = {"role": "decode", "engine_id": "de-0", "router": "tcp://127.0.0.1:1"}
    engine = parse_settings({"api_url": "http://127.0.0.1:2", "storage": location, **basic})
    return LIVE.open_storage(engine, NAMESPACE)


def reads_all(storage: BlockStorage) -> bool:
    into = memoryview(bytearray(GEOMETRY.full_block_bytes))
    return all(
        storage.read(key, into).is_good and into == block
        for key, block in zip(KEYS, BLOCKS, strict=True)
    )


@pytest.mark.nixl
def test_blocks_of_a_directory_are_the_same_with_and_without_nixl(tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu12")
    plain, by_plugin = PosixStorage(tmp_path, NAMESPACE), opened(f"nixl+posix://{tmp_path}")
    assert plain.write(KEYS[:2], BLOCKS[:2]) == 2
    assert by_plugin.write(KEYS, BLOCKS) == 1
    assert reads_all(plain)
    assert reads_all(by_plugin)
    names = [info.name for info in open_tree(f"nixl+posix://{tmp_path}").objects("")]
    assert sum(name.endswith(".kv") for name in names) == 3
    by_plugin.close()
    by_plugin.close()


@pytest.mark.nixl
def test_damaged_files_end_a_read(tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu12")
    storage = opened(f"nixl+posix://{tmp_path}")
    assert isinstance(storage, PosixStorage)
    into = memoryview(bytearray(GEOMETRY.full_block_bytes))
    for left_bytes in (0, 100, 4096, 4096 + 3072, 4096 + 7167):
        storage.write(KEYS[:1], BLOCKS[:1])
        os.truncate(storage.block_path(KEYS[0]), left_bytes)
        assert storage.read(KEYS[0], into).reason == "short"
        assert not storage.is_stored(KEYS[0])
    storage.close()


@pytest.mark.nixl
@pytest.mark.skipif(not RCLONE, reason="rclone is not here")
def test_blocks_of_a_bucket_are_the_same_with_and_without_nixl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl_cu12")
    with rclone_s3(tmp_path) as location:
        assert location.credentials is not None
        keys = location.credentials()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys.access_key_id)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys.secret_access_key)
        monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
        plain = S3Storage(location, NAMESPACE)
        place = location.url.removeprefix("s3://")
        endpoint = f"{location.scheme}://{location.host_header}"
        by_plugin = opened(f"nixl+obj://{place}?endpoint_url={endpoint}")
        plain.write(KEYS[:2], BLOCKS[:2])
        by_plugin.write(KEYS, BLOCKS)
        assert reads_all(plain)
        assert reads_all(by_plugin)
        for storage in (plain, by_plugin):
            storage.close()


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("scheme", "needs"),
    [
        ("nixl+gds", "GPUDirect Storage"),
        ("nixl+gds_mt", "GPUDirect Storage"),
        ("nixl+hf3fs", "3FS's client"),
    ],
)
def test_a_missing_plugin_is_refused_with_its_requirements(
    scheme: str, needs: str, tmp_path: Path
) -> None:
    api = pytest.importorskip("nixl_cu12._api")
    agent = api.nixl_agent("asks", api.nixl_agent_config(backends=[]))
    if agent.get_plugin_params(FILE_PLUGINS[scheme]):
        pytest.skip("it is here")
    with pytest.raises(ConfigError, match=rf"cannot be used on this machine.*{needs}.*give the"):
        opened(f"{scheme}://{tmp_path}")


def test_without_plugins_the_error_names_the_directory_or_bucket(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plugin POSIX is for engines; give the directory"):
        open_storage(f"nixl+posix://{tmp_path}", NAMESPACE)


def test_lengths_are_stored_in_the_directory_also_with_a_plugin(tmp_path: Path) -> None:
    by_plugin = open_storage(f"nixl+gds://{tmp_path}", NAMESPACE, mode=Mode.ORACLE)
    assert by_plugin.write(KEYS, BLOCKS) == 3
    assert open_storage(tmp_path, NAMESPACE, mode=Mode.ORACLE).is_stored(KEYS[0])


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (
            "s3://blocks/kv?endpoint_url=http://localhost:9000",
            {"endpoint_override": "localhost:9000", "use_virtual_addressing": "false"},
        ),
        (
            "s3://blocks?endpoint_url=https://s3.example&addressing_style=virtual",
            {"endpoint_override": "s3.example", "use_virtual_addressing": "true"},
        ),
        (
            "s3://blocks/kv?region=eu-west-1",
            {"use_virtual_addressing": "true", "region": "eu-west-1"},
        ),
    ],
)
def test_the_plugin_gets_the_address_of_the_bucket(url: str, expected: dict[str, str]) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "who", "AWS_SECRET_ACCESS_KEY": "hush"}
    found = plugin_parameters(parse_location(url, keys))
    assert found["bucket"] == "blocks"
    assert (found["access_key"], found["secret_key"]) == ("who", "hush")
    assert found.items() >= expected.items()
    assert ("endpoint_override" in found) == ("endpoint_override" in expected)


def test_an_endpoint_with_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no path in an endpoint.*s3://"):
        plugin_parameters(parse_location("s3://blocks?endpoint_url=http://h/folder", {}))
