"""Storage read through NIXL's plugins: the same blocks as without, and clear refusals."""

import os
from pathlib import Path

import pytest

from dualpath.core.blocks import BlockGeometry, StoreNamespace, block_keys
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.engine.control.surroundings import LIVE
from dualpath.engine.settings import parse_settings
from dualpath.storage.contract import BlockStorage
from dualpath.storage.factory import FILE_PLUGINS, open_storage, open_tree
from dualpath.storage.posix import PosixStorage
from dualpath.transport.nixl import nixl_package
from dualpath.transport.nixl_storage import NixlReader

GEOMETRY = BlockGeometry(16, ((3072,), (1024,), (3072,)), (0, 32, 0))
NAMESPACE = StoreNamespace("m", "bf16", "none", GEOMETRY)
KEYS = block_keys(range(48), 16)
BLOCKS = [memoryview(os.urandom(GEOMETRY.full_block_bytes)) for _ in KEYS]


def opened(location: str) -> BlockStorage:
    """Open it as an engine does."""
    basic = {"role": "decode", "engine_id": "de-0", "router": "tcp://127.0.0.1:1"}
    engine = parse_settings({"api_url": "http://127.0.0.1:2", "storage": location, **basic})
    return LIVE.open_storage(engine, NAMESPACE)


def through_nixl(folder: Path) -> PosixStorage:
    """Read with the plugin POSIX, which every machine has, in the place of GPUDirect Storage."""
    return PosixStorage(folder, NAMESPACE, reader=NixlReader("POSIX"))


def reads_all(storage: BlockStorage) -> bool:
    into = memoryview(bytearray(GEOMETRY.full_block_bytes))
    return all(
        storage.read(key, into).is_good and into == block
        for key, block in zip(KEYS, BLOCKS, strict=True)
    )


@pytest.mark.nixl
def test_blocks_of_a_directory_are_the_same_with_and_without_nixl(tmp_path: Path) -> None:
    pytest.importorskip(nixl_package())
    plain, by_plugin = PosixStorage(tmp_path, NAMESPACE), through_nixl(tmp_path)
    assert plain.write(KEYS[:2], BLOCKS[:2]).new == 2
    assert by_plugin.write(KEYS, BLOCKS).new == 1
    assert reads_all(plain)
    assert reads_all(by_plugin)
    names = [info.name for info in open_tree(f"nixl+gds://{tmp_path}").objects("")]
    assert sum(name.endswith(".kv") for name in names) == 3
    by_plugin.close()
    by_plugin.close()


@pytest.mark.nixl
def test_damaged_files_end_a_read(tmp_path: Path) -> None:
    pytest.importorskip(nixl_package())
    storage = through_nixl(tmp_path)
    into = memoryview(bytearray(GEOMETRY.full_block_bytes))
    for left_bytes in (0, 100, 4096, 4096 + 3072, 4096 + 7167):
        storage.write(KEYS[:1], BLOCKS[:1])
        os.truncate(storage.block_path(KEYS[0]), left_bytes)
        assert storage.read(KEYS[0], into).reason == "short"
        assert not storage.is_stored(KEYS[0])
    storage.close()


@pytest.mark.nixl
@pytest.mark.parametrize("scheme", FILE_PLUGINS)
def test_a_missing_plugin_is_refused_with_its_requirements(scheme: str, tmp_path: Path) -> None:
    api = pytest.importorskip(f"{nixl_package()}._api")
    agent = api.nixl_agent("asks", api.nixl_agent_config(backends=[]))
    if agent.get_plugin_params(FILE_PLUGINS[scheme]):
        pytest.skip("it is here")
    refusal = "cannot be used on this machine.*GPUDirect Storage.*give the"
    with pytest.raises(ConfigError, match=refusal):
        opened(f"{scheme}://{tmp_path}")


def test_without_plugins_the_error_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plugin GDS is for engines; give the directory"):
        open_storage(f"nixl+gds://{tmp_path}", NAMESPACE)


def test_lengths_are_stored_in_the_directory_also_with_a_plugin(tmp_path: Path) -> None:
    by_plugin = open_storage(f"nixl+gds://{tmp_path}", NAMESPACE, mode=Mode.ORACLE)
    assert by_plugin.write(KEYS, BLOCKS).new == 3
    assert open_storage(tmp_path, NAMESPACE, mode=Mode.ORACLE).is_stored(KEYS[0])
