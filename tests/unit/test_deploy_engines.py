"""vLLM's parser accepts the engines' commands of deploy/, and our plugin completes them."""

import re
import shlex

import pytest
from tests.unit.test_deploy_compose import FOLDER, services
from tests.unit.test_deploy_units import DEPLOY, keys

from dualpath.core.cluster import Role
from dualpath.launch.commands import ENGINE_ENTRY
from dualpath.vllm import engine_arguments
from dualpath.vllm.engine_arguments import GUARD_CLASS, SCHEDULER_CLASS, engine_settings

#: Variables of a unit that the operator's files set.
VARIABLES = {"DUALPATH_ENGINE_STORAGE": "kv"}
#: Files that start engines with vLLM's command, beside `dualpath serve`.
STARTERS = [
    *(FOLDER / "vllm.yaml", DEPLOY / "systemd" / "dualpath-engine@.service"),
    *(DEPLOY / "slurm" / "dualpath.sbatch", DEPLOY / "helm/dualpath/templates/_engine.tpl"),
    DEPLOY.parent / "lab/dualpath_lab/benchmarks" / "peers" / "peer_engine.py",
]


@pytest.mark.parametrize("file", STARTERS, ids=lambda file: file.name)
def test_engines_are_started_by_the_module_that_serve_starts(file):
    module, _, _ = ENGINE_ENTRY.partition(":")
    assert set(re.findall(r"\bvllm\.entrypoints[\w.]*", file.read_text())) == {module}


def test_no_other_file_of_deploy_names_a_module_of_vllm():
    naming = {
        file
        for file in DEPLOY.rglob("*")
        if file.is_file() and "vllm.entrypoints" in file.read_text(encoding="utf-8")
    }
    assert naming <= set(STARTERS)


@pytest.fixture(scope="module")
def parse():
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from dualpath.vllm.engine_config import make_arg_parser

    parser = make_arg_parser(FlexibleArgumentParser())
    return lambda command: parser.parse_args(command[command.index("--model") :])


def completed(parse, command, environment, monkeypatch):
    """The server's arguments and the engine's settings, once the plugin has seen them."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    args = parse(command)
    engine_arguments.complete(args)
    extra = args.kv_transfer_config.kv_connector_extra_config
    return args, engine_settings(extra, environment)


@pytest.mark.parametrize(("name", "role"), [("pe-0", Role.PREFILL), ("de-0", Role.DECODE)])
def test_engines_of_the_compose_file_are_complete(name, role, parse, monkeypatch):
    service = services(FOLDER / "vllm.yaml")[name]
    command = shlex.split(service["command"])
    args, settings = completed(parse, command, service["environment"], monkeypatch)
    assert (settings.role, settings.engine_id) == (role, name)
    assert settings.api_url == f"http://{name}:8000"
    # As `dualpath serve` starts them; without it engines of the CPU image ended at their start.
    assert args.enforce_eager
    assert GUARD_CLASS in args.middleware
    assert (args.scheduler_cls == SCHEDULER_CLASS) == (role is Role.PREFILL)


@pytest.mark.parametrize("role", list(Role))
def test_engines_of_the_unit_are_complete(role, parse, monkeypatch):
    unit = keys(DEPLOY / "systemd" / "dualpath-engine@.service")
    (line,) = unit["ExecStart"]
    given = {"${MODEL}": "m", "${PORT}": "8001", "$ARGUMENTS": "--max-model-len=64"}
    command = [given.get(word, word) for word in shlex.split(line)]
    words = [word for value in unit["Environment"] for word in value.split()]
    of_unit = dict(word.replace("%i", "pe-0").split("=", 1) for word in words)
    ours = {name: of_unit[name] for name in of_unit if name.startswith("DUALPATH_ENGINE_")}
    own = {"DUALPATH_ENGINE_ROLE": role.value}
    args, settings = completed(parse, command, VARIABLES | ours | own, monkeypatch)
    assert (settings.role, settings.engine_id) == (role, "pe-0")
    assert settings.api_url == "http://127.0.0.1:8001"
    assert GUARD_CLASS in args.middleware
