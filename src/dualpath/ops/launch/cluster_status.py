"""HTTP client of a cluster's status, for its supervisor."""

import http.client
from typing import Any
from urllib.parse import urlsplit

import msgspec

from dualpath.core.errors import DualPathError, EngineLostError
from dualpath.router.control.roles_client import call_roles


class ClusterStatus:
    """Queries the router at ``cluster_url`` with ``headers``; clients use ``endpoint``.

    Both URLs are the same unless front ends are processes of their own.
    """

    def __init__(self, endpoint: str, cluster_url: str, headers: dict[str, str]) -> None:
        self.endpoint = endpoint
        self.cluster_url = cluster_url
        self._headers = headers

    def read(self) -> dict[str, Any]:
        """Return the router's ``/dualpath/v1/status``.

        Raises ``EngineLostError`` if it answers with an error, ``OSError`` if it does not answer.
        """
        code, body = _get(f"{self.cluster_url}/dualpath/v1/status", self._headers)
        if code != 200:
            raise EngineLostError(f"router at {self.cluster_url} answered {code}; see its log")
        return msgspec.json.decode(body, type=dict[str, Any])

    def alive(self) -> dict[str, str]:
        """Return the role of every live engine by name; empty if the router does not answer."""
        try:
            engines = self.read()["engines"]
        except (OSError, EngineLostError, http.client.HTTPException):
            return {}
        return {engine["engine_id"]: engine["role"] for engine in engines if engine["alive"]}

    def serves(self) -> bool:
        """Whether the endpoint serves clients."""
        try:
            return _get(f"{self.endpoint}/health", {})[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def roles(self) -> dict[str, Any] | None:
        """Return the router's ``/dualpath/v1/roles``, None if it does not answer."""
        try:
            return call_roles(self.cluster_url, self._headers)
        except DualPathError:
            return None  # the router is lost or restarting; a role switch here continues


def _get(url: str, headers: dict[str, str]) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=5)
    try:
        connection.request("GET", parts.path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
