"""Settings of the router: addresses, deadlines and limits."""

from typing import Annotated

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class RouterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything an operator may choose; all times in seconds, all > 0.

    ``control_host``/``control_port``: where engines register (port 0: any free one).
    ``cluster_secret_file``: holds the secret that engines must know; empty: the environment's
    ``DUALPATH_CLUSTER_SECRET``; without either ``control_host`` must be a loopback address.
    ``mode``: None takes the mode of the first engine.
    ``engine_timeout_s``: an engine silent for that long is lost (heartbeats come every 0.5 s); one
    that takes longer to take up commands fails the attempt.
    ``suspect_timeout_s``: how long an engine whose call has just failed may take to prove that
    it lives, before it is declared lost.
    ``lookup_timeout_s``: a slower look-up counts as no hit.
    ``read_deadline_s``: the engine gives up a storage read; ``read_margin_s`` later the router
    gives up the engine.
    ``release_wait_s``: how long a DE's slots wait for the PE's word that it writes no more.
    ``engine_wait_s``: how long a request waits while a role has no live engine.
    ``request_deadline_s``: bound of a whole request, waiting and retries included.
    ``max_attempts``: engines lost under one request before it fails.
    ``max_concurrent_requests``: requests beyond it wait, first come first served;
    ``max_waiting_requests``: those beyond that many are refused (429).
    ``max_prompt_tokens``: longer prompts are refused (400); None: the model's context bounds them.
    ``api_keys``: one of them has to be shown by clients, as vLLM has it; none: the environment's
    ``VLLM_API_KEY``, and without that everybody is served.
    ``max_body_bytes``: larger HTTP bodies are refused (413); ``max_samples``: a larger ``n`` (400).
    ``alpha_tokens``, ``beta_tokens``: α and β of Algorithm 1 (§A.4: what a node reads in 3 s, what
    a GPU prefills in 5 s); None derives them from what the first engine says of itself.
    ``event_log``: file for the scheduler's events and answers (``policy.event_log``); empty:
    none.
    ``otlp_traces_endpoint``: OpenTelemetry collector that gets a trace of every request; empty:
    none.
    """

    control_host: str = "127.0.0.1"
    control_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    cluster_secret_file: str = ""
    mode: Mode | None = None
    engine_timeout_s: Seconds = 5.0
    suspect_timeout_s: Seconds = 1.5
    lookup_timeout_s: Seconds = 2.0
    read_deadline_s: Seconds = 60.0
    read_margin_s: Seconds = 5.0
    release_wait_s: Seconds = 5.0
    engine_wait_s: Seconds = 60.0
    request_deadline_s: Seconds = 600.0
    max_attempts: Count = 3
    max_concurrent_requests: Count = 4096
    max_waiting_requests: Annotated[int, msgspec.Meta(ge=0)] = 4096
    max_prompt_tokens: Count | None = None
    api_keys: tuple[str, ...] = ()
    max_body_bytes: Count = 64 << 20
    max_samples: Count = 128
    alpha_tokens: Count | None = None
    beta_tokens: Count | None = None
    event_log: str = ""
    otlp_traces_endpoint: str = ""

    def checked(self) -> "RouterSettings":
        """Return these settings; raise ``ConfigError`` for one out of its range."""
        try:
            return msgspec.convert(msgspec.to_builtins(self), RouterSettings)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"router setting: {error}; choose a value inside the stated range"
            ) from error
