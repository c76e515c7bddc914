"""Names are checked where they enter: the wire, an engine's settings, the begin of a request."""

import re

import pytest
from tests.unit.router_cluster import cluster
from tests.unit.router_fakes import FakeEngine, job

from dualpath.core import control
from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError, ConfigError, IncompatibleError
from dualpath.core.names import LONGEST_NAME_CHARACTERS, in_one_line, name_problem
from dualpath.engine.settings import EngineSettings

NAMES = ["pe-0", "", "rack 7 / node é", "x" * LONGEST_NAME_CHARACTERS, "<img src=x>"]
NO_NAMES = [
    *("pe-0\n2026 ERROR all is lost", "a\rb", "a\x00", "\x1b[2J", "a\x85b", "a\u2028b"),
    *("pe-0\u202e0-ed", "a\u200bb", "\ufeffa", "\ud800", "x" * 300, "x\n"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_printable_and_short(name):
    assert name_problem(name) is None


@pytest.mark.parametrize("name", NO_NAMES)
def test_anything_else_is_refused_and_shown_harmlessly(name):
    wrong = name_problem(name)
    assert wrong is not None
    assert wrong.isprintable()
    with pytest.raises(ConfigError, match=r"printable|NUL character"):
        EngineSettings(
            role=Role.DECODE, engine_id=name, router="tcp://127.0.0.1:1", api_url="", storage="kv"
        )


@pytest.mark.parametrize("name", [name for name in NO_NAMES if name != "\ud800"])
def test_invalid_names_are_refused_on_the_wire(name):
    messages = [
        FakeEngine(name, Role.DECODE, set()).hello(),
        control.Released(request_id=name),
        control.Failed(request_id=name, reason="no"),
    ]
    for message in messages:
        with pytest.raises(IncompatibleError) as refused:
            control.decode_engine_message(control.encode(control.unnumbered(message)))
        assert str(refused.value).isprintable()


@pytest.mark.parametrize("name", NAMES)
def test_other_names_are_valid_also_with_the_number_of_an_attempt(name):
    message = control.unnumbered(control.Released(request_id=f"{name}.12"))
    assert control.decode_engine_message(control.encode(message)) == message


@pytest.mark.virtual_time
async def test_a_request_with_an_invalid_name_is_a_client_error():
    async with cluster() as made:
        for name in NO_NAMES:
            with pytest.raises(BadRequestError, match="printable"):
                await made.run(job(name, range(9)))


def test_a_peers_text_stays_in_one_line():
    assert in_one_line("lost\nERROR \x1b[0m ü") == r"lost\nERROR \x1b[0m ü"
    assert len(in_one_line("x" * 10**6)) == 500
    assert re.fullmatch(r"[^\n]*", in_one_line("\u2028\x85\r\n"))
