"""A key or secret that is given and empty is an error wherever one is taken."""

import pytest

from dualpath.core.errors import ConfigError
from dualpath.core.settings import (
    Schema,
    declared,
    from_environment,
    from_flag,
    from_tables,
    is_secret,
)
from dualpath.engine.io.storage_maintenance import load_storage_keys
from dualpath.engine.settings import EngineSettings, parse_settings
from dualpath.launch.local_cluster import ClusterKeys
from dualpath.launch.settings import LocalClusterSettings
from dualpath.node.cluster_secret import load_secret
from dualpath.router.settings import RouterSettings
from dualpath.storage.s3_client import parse_location
from dualpath_lab.emulated.settings import EmulatedSettings

SCHEMA: Schema = {
    "router": RouterSettings,
    "cluster": LocalClusterSettings,
    "engine": EngineSettings,
}
SECRETS = [
    (section, field)
    for section, kind in SCHEMA.items()
    for field in declared(kind)
    if is_secret(field.name)
]
ENGINE = {
    "role": "prefill",
    "engine_id": "pe-0",
    "router": "tcp://127.0.0.1:5700",
    "api_url": "http://127.0.0.1:8100",
    "storage": "/kv",
}


def test_settings_with_secrets_are_known():
    assert {"api_keys", "cluster_secret_file", "storage_key_file"} <= {f.name for _, f in SECRETS}
    assert declared(EmulatedSettings)


@pytest.mark.parametrize(("section", "field"), SECRETS)
@pytest.mark.parametrize("empty", ["", " ", ","])
def test_an_empty_flag_variable_or_key_of_a_file(section, field, empty):
    with pytest.raises(ConfigError, match=f"^{field.flag} is empty; give it a value or leave it"):
        from_flag(section, field, empty, field.flag)
    name = f"DUALPATH_{section}_{field.name}".upper()
    with pytest.raises(ConfigError, match=f"^{name} is empty"):
        from_environment(SCHEMA, {name: empty})
    with pytest.raises(ConfigError, match=rf"file \[{section}\] {field.name} is empty"):
        from_tables(SCHEMA, {section: {field.name: [] if field.is_list else empty}}, "file")


def test_one_empty_key_among_several():
    (field,) = [field for field in declared(RouterSettings) if field.name == "api_keys"]
    for text in ("a,,b", "a,", '["a", ""]'):
        with pytest.raises(ConfigError, match="is empty"):
            from_flag("router", field, text, "--api-keys")
    assert from_flag("router", field, "a,b", "--api-keys").value == ("a", "b")


def test_an_empty_key_in_vllms_extra_configuration():
    with pytest.raises(ConfigError, match="storage_key_file is empty"):
        parse_settings({**ENGINE, "storage_key_file": ""})
    assert parse_settings(ENGINE).storage_key_file == ""


@pytest.mark.parametrize("content", ["", "\n", " \n \n"])
def test_an_empty_file(tmp_path, content):
    file = tmp_path / "secret"
    file.write_text(content)
    for load in (load_secret, load_storage_keys):
        with pytest.raises(ConfigError, match="is empty; create"):
            load(str(file))


def test_an_empty_variable(monkeypatch):
    for variable, load in (
        ("DUALPATH_CLUSTER_SECRET", lambda: load_secret("")),
        ("DUALPATH_STORAGE_KEY", lambda: load_storage_keys("")),
        (
            "DUALPATH_CLUSTER_SECRET",
            lambda: ClusterKeys(LocalClusterSettings(model="m", storage="/kv")),
        ),
    ):
        monkeypatch.setenv(variable, "")
        with pytest.raises(ConfigError, match=f"{variable} is set and empty"):
            load()
        monkeypatch.delenv(variable)


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_an_empty_key_of_a_bucket(name):
    whole = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "r"}
    with pytest.raises(ConfigError, match=f"{name} is set and empty"):
        parse_location("s3://bucket/prefix", {**whole, name: ""})


def test_an_empty_storage_key_does_not_mean_plain_blocks(monkeypatch):
    assert not parse_settings(ENGINE).seals_blocks
    monkeypatch.setenv("DUALPATH_STORAGE_KEY", "")
    assert parse_settings(ENGINE).seals_blocks  # its keys are loaded, which is refused
