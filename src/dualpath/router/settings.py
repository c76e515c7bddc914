"""Settings of the router: addresses, deadlines and limits.

The annotated types are the declarations that a cluster on one machine shares with its router.
"""

from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from dualpath.core.addresses import checked_tcp_address, tcp_address
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Handover, Mode
from dualpath.core.settings import Setting, Settings
from dualpath.engine.settings import SecretFile
from dualpath.node.certificates import CertFile, KeyFile
from dualpath.policy.rebalance import RebalanceSettings

AlphaTokens = Annotated[
    int | None,
    Setting(
        "alpha of Algorithm 1; none: what the slowest PE reads in 3 s (§A.4), unlimited while none "
        "knows",
        ge=1,
    ),
]
BetaTokens = Annotated[
    int | None,
    Setting(
        "beta of Algorithm 1; none: what the slowest PE computes in 5 s (§A.4), unlimited while "
        "none knows",
        ge=1,
    ),
]
ApiKeys = Annotated[
    tuple[str, ...],
    Setting(
        "one of them has to be shown by clients, as vLLM has it; none: VLLM_API_KEY of the "
        "environment, without that everybody is served",
        metavar="KEY,…",
    ),
]
OpenMetrics = Annotated[
    bool, Setting("/metrics asks for no API key, as /health; it names engines and counts requests")
]
AllowedHosts = Annotated[
    tuple[str, ...],
    Setting(
        "names, such as that of a proxy, by which a server without API keys may be called, and of "
        "sites with pages that may call it; addresses, names without a dot and its own are "
        "allowed; .example.com: all that end with it; *: all",
        metavar="NAME,…",
    ),
]
RecomputeLimit = Annotated[
    float | None,
    Setting(
        "recompute a hit if loading it takes longer than recomputing, up to this many seconds "
        "and at most read_deadline_s; 0: load all hits; none: 10 in mode split, 0 in others",
        ge=0,
    ),
]
AppendAtDecode = Annotated[
    int,
    Setting(
        "a decode engine that has a request's hit in its buffer, or reads it, computes up to this "
        "many tokens behind it, without a prefill engine; 0: a prefill engine computes them",
        ge=0,
    ),
]
EngineGroups = Annotated[
    Literal["role", "node"],
    Setting(
        "which engines fetch requests together: role: all of a role; node: those of a role and "
        "node, a data-parallel group on its own, as in the paper; an engine's own group counts "
        "before this"
    ),
]
HandoverSetting = Annotated[
    Handover,
    Setting(
        "where a decode engine receives a prompt's KV: in its DRAM buffer, in HBM that it "
        "reserves when it gets the request, or in HBM where it is free, else in the buffer; "
        "engines of several ranks, and those without receive_hbm_share, support buffer only"
    ),
]
ThirdEngineReads = Annotated[
    int,
    Setting(
        "so many decode engines that are not a request's may serve a part of its hit, from their "
        "DRAM or through their storage NIC, in modes dualpath and split; 0 as in the paper",
        ge=0,
    ),
]
DramTier = Annotated[
    bool,
    Setting(
        "blocks that a request has read or written stay in what no other needs of its engine's "
        "buffer, and requests that follow find them there"
    ),
]
EventLog = Annotated[
    str,
    Setting(
        "records the scheduler's events and decisions, replacing the file; empty: none",
        metavar="FILE",
    ),
]

FrontEnds = Annotated[
    int,
    Setting(
        "processes of this machine that serve clients, all at one port, with the scheduler in "
        "another one; 0: one process is all of it",
        ge=0,
    ),
]
UnitCount = Annotated[
    int,
    Setting(
        "with front_ends: schedulers, each with engines of its own; all front ends know all of "
        "them. Ports of the next schedulers are 10, 20 and so on higher",
        ge=1,
    ),
]
#: Distance between the same port of one unit's scheduler and of the next one's.
UNIT_PORTS_APART = 10
_LAST_PORT = 65535


def check_units(units: int, front_ends: int) -> None:
    """Raise ``ConfigError`` for several units in a process that serves clients itself."""
    if units > 1 and not front_ends:
        raise ConfigError(
            f"{{units}} is {units} and {{front_ends}} is 0; set {{front_ends}} to the number of "
            "processes that serve clients, at least 1: they divide requests between the units"
        )


class RouterSettings(Settings, frozen=True):
    """Everything an operator may choose of the router."""

    control_host: Annotated[str, Setting("where engines register", host=True)] = "127.0.0.1"
    control_port: Annotated[
        int, Setting("where engines register; 0: any free port", ge=0, le=65535)
    ] = 0
    front_ends_port: Annotated[
        int | None,
        Setting(
            "where front ends come in that are processes of their own, at control_host; 0: any "
            "free port; none: there are none",
            ge=0,
            le=65535,
        ),
    ] = None
    front_ends: FrontEnds = 0
    units: UnitCount = 1
    cluster_port: Annotated[
        int,
        Setting(
            "with front_ends: where the scheduler answers what is asked of the cluster "
            "(/dashboard, status, /metrics, roles); 0: any free port",
            ge=0,
            le=65535,
        ),
    ] = 0
    cluster_secret_file: SecretFile = ""
    engine_ca_file: Annotated[
        str,
        Setting(
            "PEM file of the authorities of engines whose api_url is https://; empty: the system's",
            metavar="FILE",
        ),
    ] = ""
    mode: Annotated[Mode | None, Setting("how KV is loaded; none: the first engine's")] = None
    engine_timeout_s: Annotated[
        float,
        Setting(
            "an engine that is silent for this time is lost (heartbeats come every 0.5 s, in "
            "clusters of more than 500 engines four times in this period or more), and an attempt "
            "fails if its engine takes longer to process commands",
            gt=0,
        ),
    ] = 5.0
    suspect_timeout_s: Annotated[
        float, Setting("after a failed call an engine must report within this time", gt=0)
    ] = 1.5
    call_silence_s: Annotated[
        float,
        Setting(
            "a call to an engine that gets no byte for this time leads to an inquiry: the engine's "
            "HTTP server is asked whether it has the call",
            gt=0,
        ),
    ] = 2.0
    inquiry_timeout_s: Annotated[
        float,
        Setting(
            "an HTTP server that does not answer an inquiry within this time is silent: its calls "
            "are retried elsewhere",
            gt=0,
        ),
    ] = 5.0
    core_timeout_s: Annotated[
        float,
        Setting(
            "an engine that has calls but reports no step of its core for this time is lost; "
            "longer than its longest step without transfers",
            gt=0,
        ),
    ] = 20.0
    lookup_timeout_s: Annotated[
        float,
        Setting(
            "limit of a look-up, including that of a second engine; blocks found by then count",
            gt=0,
        ),
    ] = 2.0
    read_deadline_s: Annotated[
        float, Setting("an engine aborts a slower storage read; the rest is recomputed", gt=0)
    ] = 60.0
    recompute_limit_s: RecomputeLimit = None
    append_at_decode_tokens: AppendAtDecode = 0
    engine_groups: EngineGroups = "role"
    handover: HandoverSetting = Handover.BUFFER
    third_engine_reads: ThirdEngineReads = 0
    read_margin_s: Annotated[
        float,
        Setting(
            "this long after read_deadline_s the router declares the engine lost; also bounds the "
            "wait for PrefillDone",
            gt=0,
        ),
    ] = 5.0
    exclusive_engine_ids: Annotated[
        bool,
        Setting(
            "an orchestrator ends a process before it starts another one of the same engine_id, "
            "as a StatefulSet does: an engine that registers from another machine or container "
            "then proves the death of its predecessor"
        ),
    ] = False
    release_wait_s: Annotated[
        float,
        Setting(
            "how long DE slots wait for the PE to report that it writes no more, before quarantine",
            gt=0,
        ),
    ] = 5.0
    engine_wait_s: Annotated[
        float, Setting("how long a request waits while a role has no live engine", gt=0)
    ] = 60.0
    request_deadline_s: Annotated[
        float, Setting("bound of a whole request, waiting and retries included", gt=0)
    ] = 600.0
    first_leg_timeout_s: Annotated[
        float,
        Setting(
            "behind another proxy: how long the second leg of a request waits for its first leg to "
            "begin, before the decode engine computes the prompt itself",
            gt=0,
        ),
    ] = 2.0
    second_leg_timeout_s: Annotated[
        float,
        Setting(
            "behind another proxy: how long a prompt's KV waits in a decode engine's buffer for "
            "the second leg of its request, before it is released",
            gt=0,
        ),
    ] = 30.0
    move_kv: Annotated[
        bool,
        Setting(
            "behind another proxy: a decode engine that gets a second leg moves the prompt's KV "
            "into its own buffer if another decode engine has it; without room there, and if "
            "this is off, the leg is passed on to that engine"
        ),
    ] = True
    drain_timeout_s: Annotated[
        float,
        Setting("after SIGTERM requests under way may take that long; 0: they end at once", ge=0),
    ] = 600.0
    role_switch_timeout_s: Annotated[
        float,
        Setting(
            "an engine that changes its role, drain and start included, is lost after it", gt=0
        ),
    ] = 900.0
    rebalance: Annotated[
        bool, Setting("engines change their role when the re-balancing policy finds that it pays")
    ] = False
    rebalance_options: Annotated[
        dict[str, float],
        Setting("settings of that policy, such as interval_s=30,horizon_s=600"),
    ] = msgspec.field(default_factory=dict)
    standby_lock: Annotated[
        str,
        Setting(
            "of routers that name the same file one serves, the others wait with everything "
            "loaded and take its place when it ends; empty: no others",
            metavar="FILE",
        ),
    ] = ""
    standby_lease: Annotated[
        str,
        Setting(
            "as standby_lock for routers of several machines, by a lease in a store: "
            "etcds://HOST:PORT/NAME (over TLS), etcd://HOST:PORT/NAME or, in a pod, "
            "kubernetes://NAMESPACE/NAME; empty: no others",
            metavar="URL",
        ),
    ] = ""
    lease_ca_file: Annotated[
        str,
        Setting(
            "with etcds: file with the authorities that sign etcd's certificate; empty: those of "
            "the system",
            metavar="FILE",
        ),
    ] = ""
    lease_cert_file: Annotated[
        str, Setting("with etcds: this scheduler's certificate; empty: none", metavar="FILE")
    ] = ""
    lease_key_file: Annotated[
        str, Setting("the private key of lease_cert_file", metavar="FILE")
    ] = ""
    lease_user: Annotated[str, Setting("with etcd: a user of etcd; empty: none")] = ""
    lease_password_file: Annotated[
        str,
        Setting(
            "file with the password of lease_user; empty: DUALPATH_LEASE_PASSWORD of the "
            "environment",
            metavar="FILE",
        ),
    ] = ""
    max_attempts: Annotated[int, Setting("attempts at a request before it fails", ge=1)] = 3
    max_concurrent_requests: Annotated[
        int,
        Setting(
            "requests that have engines or wait for them at the scheduler; those beyond it wait in "
            "the queue",
            ge=1,
        ),
    ] = 4096
    max_waiting_requests: Annotated[
        int, Setting("of those beyond max_concurrent_requests; one more gets status 429", ge=0)
    ] = 4096
    tenant_weights: Annotated[
        dict[str, float],
        Setting(
            "shares of tenants while requests wait: by the tag of their cache_salt (`dualpath "
            "storage du --by tenant`), none for requests without one; 1 for all others",
        ),
    ] = msgspec.field(default_factory=dict)
    max_prompt_tokens: Annotated[
        int | None,
        Setting("longer prompts get status 400; none: the model's context bounds them", ge=1),
    ] = None
    api_keys: ApiKeys = ()
    allowed_hosts: AllowedHosts = ()
    open_metrics: OpenMetrics = False
    max_body_bytes: Annotated[int, Setting("larger HTTP bodies get status 413", ge=1)] = 64 << 20
    max_arriving_bytes: Annotated[
        int,
        Setting("of all HTTP bodies that are not yet whole; what goes beyond gets 429", ge=1),
    ] = 512 << 20
    body_timeout_s: Annotated[
        float, Setting("an HTTP body that takes longer to arrive gets status 408", gt=0)
    ] = 60.0
    quiet_timeout_s: Annotated[
        float,
        Setting(
            "a connection that begins no HTTP request within this time is closed; after an answer "
            "it has VLLM_HTTP_TIMEOUT_KEEP_ALIVE if that is longer",
            gt=0,
        ),
    ] = 30.0
    max_connections: Annotated[
        int,
        Setting(
            "HTTP connections at once, those beyond get 429; a third of the open files at most",
            ge=1,
        ),
    ] = 16384
    max_samples: Annotated[
        int, Setting("a larger n gets status 400; VLLM_MAX_N_SEQUENCES wins", ge=1)
    ] = 128
    prefetch_sessions: Annotated[
        bool,
        Setting(
            "prefetch an agent's KV into DRAM when its tool has run as long as it usually does; if "
            "off, only when a client announces its next turn"
        ),
    ] = True
    retain_share: Annotated[
        float,
        Setting(
            "share of each decode engine's buffer that may be retained or prefetched for agents "
            "while their tools run",
            ge=0,
            le=1,
        ),
    ] = 0.8
    alpha_tokens: AlphaTokens = None
    beta_tokens: BetaTokens = None
    dram_tier: DramTier = True
    event_log: EventLog = ""
    otlp_traces_endpoint: Annotated[
        str,
        Setting(
            "OpenTelemetry collector that gets a trace of every request; empty: none", metavar="URL"
        ),
    ] = ""

    def check(self) -> None:
        """Raise ``ConfigError`` for settings that cannot be."""
        super().check()
        if self.standby_lease and self.standby_lock:
            raise ConfigError(
                f"{{standby_lease}} is {self.standby_lease!r} and {{standby_lock}} is given; leave "
                "out one of them"
            )
        if self.front_ends and (self.standby_lock or self.standby_lease):
            raise ConfigError(
                f"{{front_ends}} is {self.front_ends} and {{standby_lock}} or {{standby_lease}} is "
                "given; the scheduler of front ends is started again by itself, leave them out, or "
                "start `dualpath scheduler` with them and `dualpath frontend`"
            )
        check_units(self.units, self.front_ends)
        for port in (self.control_port, self.front_ends_port, self.cluster_port):
            if port and (last := port + (self.units - 1) * UNIT_PORTS_APART) > _LAST_PORT:
                raise ConfigError(
                    f"{{units}} is {self.units}, whose ports are {UNIT_PORTS_APART} apart: from "
                    f"{port} on the last one would be {last}; choose lower ports, or 0 for any "
                    "free ones"
                )
        self._check_lease()
        for tenant, weight in self.tenant_weights.items():
            if weight <= 0:
                raise ConfigError(
                    f"{{tenant_weights}} has {tenant}={weight:g}; a weight must be above 0, "
                    "correct it"
                )
        try:
            policy = msgspec.convert(self.rebalance_options, RebalanceSettings, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{{rebalance_options}}: {error}; correct it") from error
        if policy.ttft_slo_s is not None or policy.tpot_slo_s is not None:
            raise ConfigError(
                "{rebalance_options} has a ttft_slo_s or tpot_slo_s, which the simulator's policy "
                "knows and the router's does not; leave it out"
            )

    def _check_lease(self) -> None:
        """Raise ``ConfigError`` for credentials that the lease's store could not use."""
        from dualpath.node.cluster_secret import is_loopback  # imports libzmq

        given = [
            name
            for name in ("lease_ca_file", "lease_cert_file", "lease_key_file", "lease_user")
            if getattr(self, name)
        ]
        if not given:
            return
        parts = urlsplit(self.standby_lease)
        if parts.scheme not in ("etcd", "etcds"):
            raise ConfigError(
                f"{{{given[0]}}} is given and {{standby_lease}} is {self.standby_lease!r}; it is "
                "for etcds://HOST:PORT/NAME, leave it out"
            )
        if bool(self.lease_cert_file) != bool(self.lease_key_file):
            raise ConfigError(
                "{lease_cert_file} and {lease_key_file} belong together; give both or none"
            )
        if parts.scheme == "etcd" and given != ["lease_user"]:
            raise ConfigError(
                f"{{{given[0]}}} is given and {{standby_lease}} is {self.standby_lease!r}, which "
                "uses no TLS; write etcds://HOST:PORT/NAME"
            )
        if parts.scheme == "etcd" and not is_loopback(parts.hostname or ""):
            raise ConfigError(
                f"{{standby_lease}} is {self.standby_lease!r}, over which the password of "
                "{lease_user} would be sent in the clear; write etcds://HOST:PORT/NAME"
            )


class LinkSettings(Settings, frozen=True):
    """A front end that is a process of its own: its scheduler, or several, and its name."""

    scheduler: Annotated[
        str,
        Setting(
            "address of the router for front ends (its front_ends_port); several, with commas: "
            "each is a scheduler with engines of its own, over one storage",
            metavar="tcp://HOST:PORT,…",
        ),
    ]
    front_end_name: Annotated[
        str,
        Setting(
            "one for each front end of a scheduler; empty: machine, process id and random digits"
        ),
    ] = ""
    share_port: Annotated[
        bool,
        Setting(
            "others of this user with share_port may use the same port; connections are divided"
        ),
    ] = False

    def check(self) -> None:
        """Raise ``ConfigError`` for an address that no socket connects to, or one given twice."""
        super().check()
        seen: set[str] = set()
        for address in self.scheduler.split(","):
            if "," in self.scheduler and not address.strip():
                raise ConfigError(
                    f"{{scheduler}} is {self.scheduler!r}, in which an address is empty; write one "
                    "comma between two addresses"
                )
            unit = str(checked_tcp_address(address.strip(), "scheduler"))
            if unit in seen:
                raise ConfigError(
                    f"{{scheduler}} is {self.scheduler!r}, which has {unit} twice; give each "
                    "scheduler once, by the address that leads to its leader"
                )
            seen.add(unit)

    @property
    def schedulers(self) -> dict[str, str]:
        """The addresses of the schedulers by the names of their units, ``HOST:PORT``."""
        addresses = map(str.strip, self.scheduler.split(","))
        return {str(tcp_address(address)): address for address in addresses}


class SchedulerAddress(Settings, frozen=True):
    """The HTTP server of a scheduler's process; a router has no such settings."""

    host: Annotated[str, Setting("address of the HTTP server", host=True)] = "127.0.0.1"
    port: Annotated[int, Setting("of the HTTP server; 0: any free one", ge=0, le=65535)] = 8001
    ssl_certfile: CertFile = ""
    ssl_keyfile: KeyFile = ""
    lora_modules: Annotated[
        dict[str, str],
        Setting(
            "LoRA adapters that requests may name as model, the same for front ends and engines",
            metavar="NAME=PATH,…",
        ),
    ] = msgspec.field(default_factory=dict)
