"""The chart's standby router: arguments, permissions and probes."""

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tests.guard import GUARD_S
from tests.unit.test_deploy_helm import CLUSTERS, container, pods, rendered
from tests.unit.test_deploy_helm import pytestmark as needs_helm

from dualpath.core.modes import Mode
from dualpath.launch.ports import claim_port
from dualpath.router.scheduler.leadership import open_leadership
from dualpath.router.scheduler.leases import LeasedLeadership
from dualpath.router.settings import RouterSettings

HEALTHY = Path(__file__).parents[2] / "deploy" / "containers" / "healthy"
NAME = "dp-dualpath-router"


@pytest.fixture(scope="module")
def objects():
    """Objects of a release with two routers, by kind; those of routers alone."""
    found = rendered(*CLUSTERS["a router that stands by"])
    mine = [one for one in found if one["metadata"]["name"] == NAME]
    return {one["kind"]: one for one in mine}


@pytest.fixture
def pod(objects):
    return objects["Deployment"]["spec"]["template"]["spec"]


@needs_helm
def test_both_routers_use_the_same_lease_of_their_namespace(pod, monkeypatch):
    (lease,) = [
        word.partition("=")[2]
        for word in container(pod)["args"]
        if word.startswith("--standby-lease=")
    ]
    assert lease == f"kubernetes://default/{NAME}"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    settings = RouterSettings(mode=Mode.DUALPATH, control_port=5700, standby_lease=lease)
    assert isinstance(open_leadership(settings), LeasedLeadership)


@needs_helm
def test_routers_have_only_the_permissions_that_leader_election_needs(objects, pod):
    rules = objects["Role"]["rules"]
    assert all(rule["apiGroups"] == ["coordination.k8s.io"] for rule in rules)
    assert all(rule["resources"] == ["leases"] for rule in rules)
    allowed = {verb: rule.get("resourceNames") for rule in rules for verb in rule["verbs"]}
    assert allowed == {"create": None, "get": [NAME], "update": [NAME]}
    assert objects["RoleBinding"]["roleRef"]["name"] == NAME
    (subject,) = objects["RoleBinding"]["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": NAME, "namespace": "default"}
    assert pod["serviceAccountName"] == objects["ServiceAccount"]["metadata"]["name"]
    assert pod["automountServiceAccountToken"]


@needs_helm
def test_only_routers_with_a_standby_get_a_token():
    for settings in CLUSTERS.values():
        for name, pod in pods(rendered(*settings)):
            takes_turns = "router.standby=true" in settings and name.startswith(NAME)
            assert pod["automountServiceAccountToken"] is takes_turns, name


@needs_helm
def test_an_upgrade_does_not_wait_for_ports_that_only_a_leader_opens(objects, pod):
    probes = {key for key in container(pod) if key.endswith("Probe")}
    assert probes == {"livenessProbe"}
    assert container(pod)["livenessProbe"]["exec"]["command"] == ["healthy", "--alive", "8000"]
    spec = objects["Deployment"]["spec"]
    assert spec["replicas"] == 2
    assert spec["minReadySeconds"] == 60
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert objects["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1


def healthy(*words):
    run = subprocess.run([sys.executable, HEALTHY, *words], timeout=GUARD_S, check=False)
    return run.returncode == 0


class Unavailable(BaseHTTPRequestHandler):
    """A router that has no engines."""

    def do_GET(self):
        self.send_error(503)

    def log_message(self, *words):
        """Not in the tests' output."""


def test_a_standby_router_is_alive_and_not_healthy():
    port = str(claim_port())
    assert healthy("--alive", port)
    assert not healthy(port)


def test_a_router_without_engines_is_alive_and_not_healthy():
    with ThreadingHTTPServer(("127.0.0.1", 0), Unavailable) as server:
        serving = Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        port = str(server.server_port)
        assert healthy("--alive", port)
        assert not healthy(port)
        server.shutdown()
        serving.join()
