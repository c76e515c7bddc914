"""The documentation matches the code: links, command line, metrics, settings, messages."""

import functools
import importlib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from dualpath.core import control
from dualpath.core.cluster import Role
from dualpath.engine.settings import EngineSettings
from dualpath.launch.commands import ENGINE_ENVIRONMENT, engine_command, router_command
from dualpath.launch.settings import LocalClusterSettings
from dualpath.policy.events import SchedulerEvent, SchedulerSettings
from dualpath.router.observe.engine_metrics import MOVEMENTS
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.scheduler.registry import Registry
from dualpath.router.settings import LinkSettings, RouterSettings, SchedulerAddress
from dualpath.router.stages import Stage
from dualpath.vllm.front_end_settings import FrontEndSettings
from dualpath_lab.emulated.settings import EmulatedOptions

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "lab/dualpath_lab/benchmarks").rglob("*.md"),
    ]
)
REFERENCE = ROOT / "docs" / "reference"

#: First components of absolute paths that a reader may meet: routes of HTTP, and mount points.
NEUTRAL_PATHS = {"v1", "dualpath", "dashboard", "health", "metrics", "inference", "mnt"} | {
    "dev", "tokenize", "detokenize", "generative_scoring", "invocations", "ping", "load", "version",
    "sleep", "collective_rpc", "update_weights", "proc", "pause", "resume", "wake_up",
    "start_weight_update", "finish_weight_update", "update_weight_version", "weight_checker",
    "weight_info", "is_sleeping", "is_paused", "reset_prefix_cache", "init_weight_transfer_engine",
    "query",
}  # fmt: skip


def source(name: str) -> Path:
    """The file that a page names by its path in the repository or in ``src/dualpath``."""
    return next(
        (file for file in (ROOT / name,) if file.exists()), ROOT / "src" / "dualpath" / name
    )


def page(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


@functools.cache
def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to headings."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def links(path: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    yield from re.findall(r"\]\(\s*([^)\s]+)\s*\)", text)
    yield from re.findall(r'src="([^"]+)"', text)


def test_every_link_leads_somewhere() -> None:
    broken = []
    for path in PAGES:
        for link in (link for link in links(path) if "://" not in link):
            target, _, anchor = link.partition("#")
            file = (path.parent / target).resolve() if target else path
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append((str(path.relative_to(ROOT)), link))
    assert broken == []


def test_no_page_names_a_place_on_somebodys_machine() -> None:
    for path in PAGES:
        text = re.sub(r"https?://\S+", "", path.read_text(encoding="utf-8"))
        first_components = set(re.findall(r"(?<![\w.~<>)/*-])/([a-z][\w.-]*)", text))
        assert first_components <= NEUTRAL_PATHS, path


@pytest.mark.parametrize("name", ["architecture.md", "reference/paper.md"])
def test_files_named_in_the_text_exist(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    names = re.findall(r"`((?:\w+/)*\w+\.py)`", text)
    folder = ""
    for name in names:
        # "`engine/buffer/block_buffer.py`, `buffer.py`": the folder of the one before is meant.
        if "/" in name:
            folder = name.rpartition("/")[0]
        full = name if "/" in name else f"{folder}/{name}"
        assert source(full).exists(), name
    assert names


def test_symbols_of_the_paper_have_the_names_of_the_code() -> None:
    section = page("paper.md").split("## Words and symbols\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if ".py`" in line]
    assert len(rows) > 20
    for _, _, names, _, file in rows:
        words = set(re.findall(r"\w+", source(file.strip("` |")).read_text(encoding="utf-8")))
        assert set(re.findall(r"`(\w+)`", names)) <= words, file


def test_names_of_the_python_api_can_be_imported_and_are_documented() -> None:
    names = re.findall(r"`(dualpath(?:_sim|_lab)?(?:\.\w+)+)\.(\w+)`", page("python-api.md"))
    assert len(names) > 20
    for module, name in names:
        assert getattr(importlib.import_module(module), name).__doc__, f"{module}.{name}"


def test_readme_leads_to_every_page() -> None:
    reached: set[Path] = set()
    unread = [ROOT / "README.md"]
    while unread:
        page = unread.pop()
        if page not in reached and page in PAGES:
            reached.add(page)
            found = (link.partition("#")[0] for link in links(page) if "://" not in link)
            unread += [(page.parent / link).resolve() for link in found if link]
    assert {path for path in PAGES if (ROOT / "docs") in path.parents} <= reached


def test_the_page_on_own_servers_names_every_argument_that_the_launcher_gives() -> None:
    text = (ROOT / "docs" / "how-to" / "separate-machines.md").read_text(encoding="utf-8")
    settings = LocalClusterSettings(model="MODEL", storage="/mnt/kv")
    for command in (
        router_command(settings, 8000, 5700),
        engine_command(settings, Role.PREFILL, 0, 8001, 5700),
        engine_command(settings, Role.DECODE, 0, 8002, 5700),
    ):
        assert not [word for word in command if word.startswith("--") and word not in text]
    assert all(f"{name}={value}" in text for name, value in ENGINE_ENVIRONMENT.items())


def test_the_command_line_reference_is_current() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate_cli.py"))
    assert generator["current"](generator["render"]()), "run python docs/generate_cli.py"


def test_the_reference_of_the_data_path_is_made_of_the_plan() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate_data_path.py"))
    assert generator["current"](generator["render"]()), "run python docs/generate_data_path.py"


def test_the_picture_of_the_readme_shows_what_was_measured() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate_picture.py"))
    assert generator["render"]() == generator["PICTURE"].read_text(encoding="utf-8"), (
        "run python docs/generate_picture.py"
    )


def test_tables_of_measurements_match_their_data() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "draw_lab.py"))
    assert generator["current"](), "run python docs/draw_lab.py"


def test_every_metric_is_in_the_reference_with_its_help() -> None:
    metrics = RouterMetrics(Registry(), dict)
    metrics.define_units(["a:1"])
    reference = page("metrics.md")
    documented = dict(re.findall(r"^\| `(dualpath:\w+)` \|.*\| (.+) \|$", reference, re.MULTILINE))
    real = {
        family.name + ("_total" if family.type == "counter" else ""): family.documentation
        for family in metrics.families()
    }
    assert documented == real


def test_every_stage_and_movement_of_kv_is_in_the_metrics_reference() -> None:
    reference = page("metrics.md")
    for stage in Stage:
        assert f"| `{stage}` |" in reference
    for row in MOVEMENTS:
        labels = f"`{row.path}` | `{row.link}` | `{row.traffic_class}`"
        assert re.search(rf"^\| `{row.step}` \| .* \| {re.escape(labels)} \|$", reference, re.M)


@pytest.mark.parametrize(
    ("heading", "settings"),
    [
        ("Engine: `kv_connector_extra_config`", EngineSettings),
        ("Router", RouterSettings),
        ("Router's front end", FrontEndSettings),
        ("Scheduler of its own process", SchedulerAddress),
        ("Front end of its own process", LinkSettings),
        ("Cluster on one machine", LocalClusterSettings),
        ("Emulated engine", EmulatedOptions),
    ],
)
def test_every_setting_is_in_the_reference_with_its_default(
    heading: str, settings: type[msgspec.Struct]
) -> None:
    assert documented_defaults(heading) == {
        field.name: shown(default(field)) for field in msgspec.structs.fields(settings)
    }


def test_documented_scheduler_settings_have_these_defaults() -> None:
    real = {f.name: shown(default(f)) for f in msgspec.structs.fields(SchedulerSettings)}
    assert documented_defaults("Scheduler").items() <= real.items()


def documented_defaults(heading: str) -> dict[str, str]:
    section = page("settings.md").split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) \|", section, flags=re.MULTILINE))


def default(field: msgspec.structs.FieldInfo) -> Any:
    made = field.default_factory
    return field.default if made is msgspec.NODEFAULT else made()


def shown(value: Any) -> str:
    if value is msgspec.NODEFAULT:
        return "required"
    if value in (None, ()):
        return "none"
    return "empty" if value == "" else f"`{value}`"


def test_the_tables_of_a_session_are_those_that_are_executed() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate_control_protocol.py"))
    current = generator["with_tables"](page("control-protocol.md"))
    assert current == page("control-protocol.md"), "run python docs/generate_control_protocol.py"


def test_every_control_message_is_in_the_reference_with_its_fields() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page("control-protocol.md"), re.MULTILINE)
    documented = {name: tuple(re.findall(r"`(\w+)`", fields)) for name, fields in rows}
    assert f"protocol version {control.PROTOCOL_VERSION}." in page("control-protocol.md")
    messages = (*get_args(control.RouterMessage), *get_args(control.EngineMessage))
    assert documented == {kind.__name__: kind.__struct_fields__ for kind in messages}


def test_every_event_of_a_schedulers_log_is_on_the_page_about_it() -> None:
    text = (ROOT / "docs" / "how-to" / "record-decisions.md").read_text(encoding="utf-8")
    events = " ".join(re.findall(r"^\| (`.+?) \|", text, re.MULTILINE))
    kinds = SchedulerEvent.__subclasses__()
    real = {kind.__struct_config__.tag for kind in kinds}
    assert set(re.findall(r"`(\w+)`", events)) == real
