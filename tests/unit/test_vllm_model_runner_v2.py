"""Model Runner V2, the default on GPUs, calls connectors through a class of its own.

The runner itself needs Triton. Its class for connectors is vLLM's own here, and calls our
connector; its worker side records the calls in a list.
"""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu import kv_connector as runner_v2

from dualpath.vllm.connector import DualPathConnector
from dualpath.vllm.metadata import StepMetadata


class ConnectorFake:
    """A worker side that records its calls in order."""

    def __init__(self):
        self.calls = []

    def register(self, kv_caches):
        self.calls.append("register")

    def take_kv_events(self):
        return None

    def begin_step(self, step):
        self.calls.append("begin step")

    def wait_loaded(self, layer_name):
        self.calls.append(f"wait for {layer_name}")

    def computed(self, layer_name):
        self.calls.append(f"computed {layer_name}")

    def end_step(self):
        self.calls.append("end step")

    def take_copied(self):
        self.calls.append("take copied")
        return {"over", "failed"}, {"failed"}

    def take_held_blocks(self):
        return None


@pytest.fixture
def connector_fake():
    return ConnectorFake()


@pytest.fixture
def runner(connector_fake, monkeypatch):
    connector = object.__new__(DualPathConnector)
    connector._worker, connector._connector_metadata = connector_fake, None
    monkeypatch.setattr(runner_v2, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(runner_v2, "set_forward_context", lambda *_: _Nothing())
    monkeypatch.setattr(runner_v2, "get_forward_context", lambda: None)
    former = runner_v2.kv_transfer_state._KV_CONNECTOR_AGENT
    yield runner_v2.ActiveKVConnector(SimpleNamespace(), {})
    runner_v2.kv_transfer_state._KV_CONNECTOR_AGENT = former


class _Nothing:
    def __enter__(self):
        return None

    def __exit__(self, *error):
        return None


def a_step():
    step = SchedulerOutput.make_empty()
    step.kv_connector_metadata = StepMetadata()
    return step


def test_a_step_begins_before_its_layers_and_ends_after_its_token_is_sampled(
    runner, connector_fake
):
    step = a_step()
    runner.pre_forward(step)
    runner.kv_connector.wait_for_layer_load("layer 0")
    runner.kv_connector.save_kv_layer("layer 0", None, None)
    runner.finish_forward()
    connector_fake.calls.append("sample")
    output = runner.post_forward(set())
    assert connector_fake.calls == [
        *("register", "begin step", "wait for layer 0", "computed layer 0"),
        *("sample", "end step", "take copied"),
    ]
    assert (output.finished_recving, output.failed_recving) == ({"over", "failed"}, {"failed"})


def test_a_step_without_tokens_begins_and_ends_too(runner, connector_fake):
    """A decode engine's copies start and end in such steps, while nothing runs."""
    output = runner.no_forward(a_step())
    assert connector_fake.calls == ["register", "begin step", "end step", "take copied"]
    assert output.kv_connector_output.finished_recving == {"over", "failed"}


def test_a_dummy_step_does_not_call_the_connector(runner, connector_fake):
    """Warm-up, and the steps of a data-parallel rank that has nothing to do."""
    runner.set_disabled(True)
    runner.pre_forward(a_step())
    runner.finish_forward()
    assert runner.post_forward(set()) is None
    assert runner_v2.kv_transfer_state._KV_CONNECTOR_AGENT is None  # as layers see it
    assert connector_fake.calls == ["register"]
