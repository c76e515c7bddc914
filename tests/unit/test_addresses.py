"""Hosts, ports and URLs as text: brackets around IPv6, and errors that give the remedy."""

import socket

import pytest
import zmq

from dualpath.cli.main import main
from dualpath.core.addresses import (
    HostPort,
    checked_http_url,
    host_and_port,
    http_url,
    plain_host,
    tcp_address,
    tcp_endpoint,
)
from dualpath.core.errors import ConfigError
from dualpath.engine.control.link import connect_dealer
from dualpath.node.sockets import engine_url, listening_socket
from dualpath.router.settings import LinkSettings, RouterSettings, SchedulerAddress


@pytest.mark.parametrize("typed", ["::1", "[::1]"])
def test_ipv6_may_be_typed_with_or_without_brackets(typed: str):
    for settings in (SchedulerAddress(host=typed), SchedulerAddress(host="::1")):
        assert settings.host == "::1"
    assert RouterSettings(control_host=typed).control_host == "::1"
    assert http_url(plain_host(typed), 80, tls=True) == "https://[::1]:80"
    assert tcp_endpoint(plain_host(typed), 5700) == "tcp://[::1]:5700"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "pe-0.engines.svc", "de_0", "fe80::1%lo"]
)
def test_names_and_addresses_are_hosts(host: str):
    assert plain_host(host) == host
    assert host_and_port(str(HostPort(host, 80))) == (host, 80)


@pytest.mark.parametrize(
    ("host", "remedy"),
    [
        ("", "0.0.0.0 or ::"),
        ("*", "0.0.0.0 or ::"),
        ("127.0.0.1:80", "alone"),
        ("http://a", "alone"),
        ("::g", "no IPv6 address"),
        ("[::1", "no IPv6 address"),
        ("[a]", "no IPv6 address"),
        ("1.2.3.400", "no IPv4 address"),
        ("two words", "neither an address nor a name"),
    ],
)
def test_no_host_is_an_error_with_a_remedy(host: str, remedy: str):
    with pytest.raises(ConfigError, match=remedy) as failure:
        RouterSettings(control_host=host)
    assert "control_host" in str(failure.value)


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("tcp://::1:5700", r"write \[::1\]:5700"),
        ("tcp://::1", r"without a port"),
        ("tcp://a", "HOST:PORT"),
        ("tcp://a:0", "between 1 and 65535"),
        ("tcp://a:x", "between 1 and 65535"),
        ("a:1", "tcp://"),
        ("http://a:1", "tcp://"),
        ("tcp://[::1]x:1", "HOST:PORT"),
        ("tcp://[::g]:1", "no IPv6 address"),
    ],
)
def test_no_control_address_is_an_error_with_a_remedy(url: str, remedy: str):
    with pytest.raises(ValueError, match=remedy):
        tcp_address(url)
    for several in (url, f"tcp://a:1,{url}", f"{url},tcp://a:1"):
        with pytest.raises(ConfigError, match=r"scheduler is .*use the form tcp://host:port"):
            LinkSettings(scheduler=several)


def test_the_address_of_each_scheduler_names_its_unit():
    one, several = "tcp://a:1", "tcp://a:1, tcp://[::1]:5701,tcp://b:2/"
    assert LinkSettings(scheduler=one).schedulers == {"a:1": one}
    assert [*LinkSettings(scheduler=several).schedulers] == ["a:1", "[::1]:5701", "b:2"]


@pytest.mark.parametrize("several", ["tcp://a:1,tcp://a:1", "tcp://a:1,tcp://b:1,tcp://a:1/"])
def test_the_address_of_a_scheduler_is_given_once(several: str):
    with pytest.raises(
        ConfigError, match=r"scheduler is .*has a:1 twice; give each scheduler once"
    ):
        LinkSettings(scheduler=several)


@pytest.mark.parametrize("several", ["tcp://a:1,", ",tcp://a:1", "tcp://a:1,,tcp://b:1"])
def test_an_empty_address_among_schedulers_is_an_error(several: str):
    with pytest.raises(ConfigError, match="in which an address is empty"):
        LinkSettings(scheduler=several)


@pytest.mark.parametrize(
    ("several", "message"),
    [
        ("tcp://127.0.0.1:1,tcp://a", "--scheduler is 'tcp://a': not of the form HOST:PORT"),
        ("tcp://127.0.0.1:1,tcp://127.0.0.1:1", "has 127.0.0.1:1 twice"),
        ("tcp://127.0.0.1:1,tcp://192.0.2.1:1", "'192.0.2.1' is reachable from other machines"),
    ],
)
def test_a_front_end_with_a_wrong_address_of_a_scheduler_does_not_start(
    several: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("DUALPATH_CLUSTER_SECRET", raising=False)
    assert main(["emulate", "frontend", "--port", "0", "--scheduler", several]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("http://::1:80", r"write \[::1\]:80"),
        ("http://[::1:80", "IPv6"),
        ("http://a:99999", "between 1 and 65535"),
        ("ftp://a:1", "http://"),
        ("localhost:8000", "http://"),
        ("http://", "http://"),
    ],
)
def test_no_url_of_a_server_is_an_error_with_a_remedy(url: str, remedy: str):
    with pytest.raises(ConfigError, match=remedy) as failure:
        checked_http_url(url, "endpoint")
    assert "endpoint" in str(failure.value)


@pytest.mark.parametrize(
    "url", ["http://[::1]:80/v1/", "https://a", "http://u:p@[::1]:80", "http://[::1]"]
)
def test_urls_of_servers_lose_only_their_last_slash(url: str):
    assert checked_http_url(url, "endpoint") == url.rstrip("/")


def test_a_listener_on_every_ipv6_address_takes_ipv4_as_well():
    with listening_socket("::", 0, 1, share=False) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port)).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_engine_on_every_address_is_reached_at_its_address_towards_the_router(host: str):
    url = engine_url("::", 8100, tcp_endpoint(host, 5700))
    assert url == http_url(host, 8100)


def test_a_dealer_says_what_is_wrong_with_an_address():
    dealer = zmq.Context().socket(zmq.DEALER)
    with pytest.raises(ConfigError, match=r"router address .*write \[::1\]:5700"):
        connect_dealer(dealer, "tcp://::1:5700", "router")
