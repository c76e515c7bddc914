"""The router on vLLM's application serves the same page and data as the light one."""

import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI
from fastapi.testclient import TestClient
from tests.unit.dashboard_cluster import ReportedCluster

from dualpath.router.observe.dashboard.board import SCHEMA
from dualpath.router.observe.dashboard.page_file import dashboard_page
from dualpath.vllm.app import add_dashboard, add_pointers


@pytest.fixture
def client():
    app = FastAPI()
    add_dashboard(app, ReportedCluster().dashboard)
    return TestClient(app)


def test_the_page_comes_with_its_policy(client):
    page = client.get("/dashboard")
    assert page.content == dashboard_page().body
    assert {name: page.headers[name] for name in dashboard_page().headers} == (
        dashboard_page().headers
    )


def test_a_front_end_names_the_place_of_the_page():
    app = FastAPI()
    add_pointers(app)
    client = TestClient(app)
    for path in ("/dashboard", "/dualpath/v1/dashboard", "/dualpath/v1/roles"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert "--cluster-port" in answer.json()["error"]["message"]
    add_dashboard(app, ReportedCluster().dashboard)
    assert client.get("/dashboard").status_code == 200


def test_the_data_are_those_of_the_service(client):
    body = client.get("/dualpath/v1/dashboard").json()
    assert (body["schema"], body["seq"]) == (SCHEMA, 0)
    refusal = client.get("/dualpath/v1/dashboard", params={"since": "x"})
    assert refusal.status_code == 400
    assert "leave it out" in refusal.json()["error"]["message"]
