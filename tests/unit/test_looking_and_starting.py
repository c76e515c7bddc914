"""Looking creates nothing, and a dry run refuses what a start refuses."""

import importlib.util
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.typed_commands import all_commands

from dualpath.cli.main import main
from dualpath.core.blocks import BlockGeometry, StoreNamespace, block_keys
from dualpath.core.errors import ConfigError
from dualpath.launch.doctor.checks import CheckSettings, examine
from dualpath.launch.doctor.node import Node
from dualpath.launch.local_cluster import LocalCluster
from dualpath.launch.settings import LocalClusterSettings
from dualpath.storage.factory import directory_of, split_location
from dualpath.storage.posix import PosixStorage
from dualpath.storage.s3_client import parse_location

GEOMETRY = BlockGeometry.uniform(layers=2, block_tokens=1, layer_block_bytes=2048)
NAMESPACE = StoreNamespace("org/tiny", "float32", "NHD", GEOMETRY)
KEYS = block_keys([7] * 4, 1)
DATA = [memoryview(bytes([number]) * GEOMETRY.full_block_bytes) for number in range(1, 5)]

STORAGE_ACTIONS = [c.words[1] for c in all_commands() if c.words[0] == "storage"]


@pytest.fixture
def stored(tmp_path: Path) -> PosixStorage:
    """A storage with a chain of four blocks."""
    storage = PosixStorage(tmp_path / "kv", NAMESPACE)
    storage.write(KEYS, DATA)
    return storage


# ------------------------------------------------------------------------- looking changes nothing


@pytest.mark.parametrize("action", STORAGE_ACTIONS)
def test_an_action_on_a_storage_that_is_not_there_creates_none(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"rm": ["--unused-for", "7d"], "janitor": ["--storage-ttl", "7d"]}.get(action, [])
    assert main(["storage", action, str(tmp_path / "typo" / "kv"), *more]) == 2
    assert "there is no storage at" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_doctor_measures_no_storage_that_is_not_there(tmp_path: Path) -> None:
    settings = CheckSettings(storage=str(tmp_path / "typo"), skip=("vllm", "nixl"))
    found = [f for f in examine(settings, Node()) if f.check == "Storage"]
    assert [(f.status.value, f.found) for f in found] == [
        ("warning", f"{tmp_path / 'typo'} does not exist")
    ]
    (tmp_path / "file").touch()
    settings = CheckSettings(storage=str(tmp_path / "file" / "kv"), skip=("vllm", "nixl"))
    found = [f for f in examine(settings, Node()) if f.check == "Storage"]
    assert [f.status.value for f in found] == ["error"]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--namespace", "TYPO"], "did you mean "),
        (["--namespace", "NAME", "--chain", "ab" * 32], "has no such block"),
        (["--tenant", "0123456789abcdef"], "has no blocks in this storage"),
        (["--cache-salt", "a typo"], "has no blocks in this storage"),
    ],
)
def test_what_is_not_there_is_not_pinned(
    stored: PosixStorage,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    (name,) = [path.name for path in (tmp_path / "kv").iterdir()]
    known = {"NAME": name, "TYPO": name.replace("tiny", "tinny")}
    words = [known.get(word, word) for word in words]
    before = sorted((tmp_path / "kv").rglob("*"))
    assert main(["storage", "pin", str(tmp_path / "kv"), *words]) == 2
    assert message in capsys.readouterr().err
    assert sorted((tmp_path / "kv").rglob("*")) == before
    chain = ["--chain", KEYS[1].hex()]
    assert main(["storage", "pin", str(tmp_path / "kv"), "--namespace", name, *chain]) == 0
    assert capsys.readouterr().out == f"chain/{name}/{KEYS[1].hex()}\n"


def test_a_start_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cluster = LocalCluster(
            _settings(tmp_path, port=taken.getsockname()[1], log_dir=str(tmp_path / "logs"))
        )
        with pytest.raises(ConfigError, match="port"):
            cluster.start()
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


# --------------------------------------------------------------------------- a dry run and a start


def _settings(model: Path, **changes: Any) -> LocalClusterSettings:
    values = {"model": str(model), "storage": str(model / "kv"), **changes}
    return LocalClusterSettings(**values)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--storage-protection encrypted", "blocks must be encrypted, and there is no storage key"),
        ("--storage-key-file none", "--storage-key-file .* cannot be read"),
        ("--dram-dir shared", "--dram-dir is .* and --dram-bytes is 0"),
        ("--dram-dir model/config.json/x --dram-bytes 1GB", "--dram-dir .*Not a directory"),
        ("--dtype foo", "--dtype is 'foo'; it must be one of auto, half"),
        ("--profile none.toml", "--profile 'none.toml' cannot be read"),
        ("--profile model/config.json", "is not a file of `dualpath profile`"),
        ("--lora-modules sql=./none", "--lora-modules sql=./none: adapter_config.json cannot"),
        ("--buffer-bytes 1", "--buffer-bytes is 1, below the 128 bytes of one Full Block"),
        ("--config engine.toml", "storage_low is 0.99, above storage_high of 0.5"),
        ("--log-dir model/config.json/logs", "--log-dir .*Not a directory"),
        ("--trace-dir model/config.json/x", "--trace-dir .*Not a directory"),
        ("--event-log none/events", "--event-log .*No such file or directory"),
        ("--storage s3://kvs--use1-az4--x-s3/p", "directory bucket"),
        ("--storage gs://kv", "is none of PATH"),
        ("--storage model/config.json/kv", "cannot be written .Not a directory"),
        ("--prefill-tp 3", "--prefill-tp is 3, and model .* has 4 attention heads"),
        ("--block-tokens 65", "--block-tokens is 65"),
        ("--config router.toml", "max_samples is 0"),
        ("--port {taken}", "port .* on 127.0.0.1 cannot be used .Address already in use"),
        ("--vllm-args --ssl-certfile none --ssl-keyfile none", "none.* No such file"),
    ],
)
def test_a_dry_run_refuses_what_a_start_refuses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    config = {"num_attention_heads": 4, "num_hidden_layers": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "router.toml").write_text("[router]\nmax_samples = 0\n")
    (tmp_path / "engine.toml").write_text("[engine]\nstorage_low = 0.99\nstorage_high = 0.5\n")
    storage = [] if "--storage " in flags else ["--storage", "kv"]
    before = sorted(tmp_path.rglob("*"))
    refused = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = flags.format(taken=taken.getsockname()[1]).split()
        for dry in (["--dry-run"], []):
            assert main(["serve", "./model", *storage, *dry, *words]) == 2
            refused.append(capsys.readouterr().err)
    assert refused[0] == refused[1]
    assert re.search(message, refused[0]), refused[0]
    assert sorted(tmp_path.rglob("*")) == before


DRY_RUN = ["serve", "m", "--storage", "kv", "--port", "0", "--dry-run"]


def test_a_dry_run_reports_missing_packages_and_prints_commands_for_other_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name)
    )
    assert main([*DRY_RUN, "--vllm-args", "--no-such-flag"]) == 0
    printed = capsys.readouterr()
    assert "a start on this machine needs the package vllm, which is not installed" in printed.err
    assert printed.out.startswith("dualpath router")
    assert main([*DRY_RUN[:-1], "--mode", "oracle"]) == 2
    assert "needs the package vllm, which is not installed" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not here")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--no-such-flag", "front-end arguments: unrecognized arguments: --no-such-flag"),
        ("--max-num-seqs many", "front-end arguments: argument --max-num-seqs"),
        ("--api-server-count 2", "--api-server-count 2 does not apply to the router"),
    ],
)
def test_vllms_parser_reads_its_arguments_in_a_dry_run(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*DRY_RUN, "--vllm-args", *words.split()]) == 2
    refused = capsys.readouterr()
    assert message in refused.err
    assert not refused.out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a folder with a config.json"),
        ("{", "config.json is not JSON"),
        ("[]", "config.json is not a JSON object"),
        ("[" * 100_000, "config.json is not JSON"),
    ],
)
def test_a_broken_configuration_of_a_model_is_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main(["serve", str(tmp_path), "--storage", str(tmp_path / "kv"), "--dry-run"]) == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------------------- blocks without bytes


def test_empty_blocks_are_corrupt_and_removed(
    stored: PosixStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in KEYS[1:3]:
        Path(stored.block_path(key)).write_bytes(b"")
    arguments = ["storage", "verify", str(tmp_path / "kv"), "--survey", "--rate", "0"]
    assert main(arguments) == 1
    assert "2 corrupt" in capsys.readouterr().out
    assert main([*arguments, "--remove"]) == 1
    assert [Path(stored.block_path(key)).exists() for key in KEYS] == [True, False, False, True]
    assert main(arguments) == 0


def test_empty_blocks_are_no_hits_and_the_next_writer_replaces_all_of_them(
    stored: PosixStorage,
) -> None:
    for key in KEYS:
        Path(stored.block_path(key)).write_bytes(b"")
    assert [stored.is_stored(key) for key in KEYS] == [False] * 4
    assert stored.write(KEYS, DATA).new == 4
    for key, content in zip(KEYS, DATA, strict=True):
        read = memoryview(bytearray(GEOMETRY.full_block_bytes))
        assert stored.read(key, read).reason is None
        assert read == content


def test_an_empty_description_of_a_namespace_is_written_again(
    stored: PosixStorage, tmp_path: Path
) -> None:
    (file,) = (tmp_path / "kv").glob("*/namespace.json")
    content = file.read_bytes()
    file.write_bytes(b"")
    PosixStorage(tmp_path / "kv", NAMESPACE)
    assert file.read_bytes() == content


# --------------------------------------------------------------------------------------- locations


@pytest.mark.parametrize(
    ("location", "directory"),
    [
        ("file:///mnt/kv", "/mnt/kv"),
        ("file://localhost/mnt/kv", "/mnt/kv"),
        ("nixl+gds://localhost/mnt/kv", "/mnt/kv"),
        ("~/kv", "HOME/kv"),
        ("kv", "kv"),
    ],
)
def test_a_location_names_a_directory(
    location: str, directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert directory_of(location) == Path(directory.replace("HOME", str(tmp_path)))


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("file://nas/kv", "names the host 'nas'; give file:///PATH"),
        ("file://localhost", "names the host 'localhost'"),
        ("~no-such-user/kv", "no home directory"),
    ],
)
def test_a_location_elsewhere_is_refused(location: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_location(location)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://kvs/p?region=eu-central-1", "kvs.s3.eu-central-1.amazonaws.com/p/"),
        ("s3://my.kv/p?region=eu-central-1", "s3.eu-central-1.amazonaws.com/my.kv/p/"),
        ("s3://kvs/p?region=cn-north-1", "kvs.s3.cn-north-1.amazonaws.com.cn/p/"),
        ("s3://kvs/p?region=us-iso-east-1", "kvs.s3.us-iso-east-1.c2s.ic.gov/p/"),
        ("s3://kvs/p?region=us-gov-west-1", "kvs.s3.us-gov-west-1.amazonaws.com/p/"),
    ],
)
def test_amazons_hosts(url: str, place: str) -> None:
    found = parse_location(url, {})
    assert f"{found.host}{found.base}" == place


def test_amazons_domains_are_those_of_botocore() -> None:
    botocore = pytest.importorskip("botocore.session")
    resolver = botocore.get_session().get_component("endpoint_resolver")
    for partition in resolver.get_available_partitions():
        for region in resolver.get_available_endpoints("s3", partition):
            if "-" not in region or region.startswith(("aws-", "s3-", "fips-")):
                continue
            own = parse_location(f"s3://kvs/p?region={region}", {}).host
            assert own.endswith(resolver.get_partition_dns_suffix(partition)), region


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://kvs--use1-az4--x-s3/p", "directory bucket"),
        ("s3://kvs/p#1", "has a #"),
        ("s3://kvs/p?region=us%20east", "S3 region is 'us east'"),
        ("s3://kvs/p?region=", "'region' has no value"),
        ("s3://kvs/p?regoin", "storage parameter 'regoin'"),
        ("s3://k..v/p", "give a bucket name"),
        ("s3://kvs/p?endpoint_url=http://10.0.0.1:9000&addressing_style=virtual", "an address"),
    ],
)
def test_places_that_no_bucket_has_are_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_location(url, {})
