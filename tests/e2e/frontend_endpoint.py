"""The router's HTTP application over a scripted service, on a port and an event loop of its own."""

import asyncio
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing

import numpy as np
import torch
import uvicorn
from tests.guard import GUARD_S
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.router.engine_calls import TokenEvent
from dualpath.router.engines import missing_engines
from dualpath.router.hit_account import HitPlace
from dualpath.router.observe.dashboard.board import Dashboard, Load
from dualpath.router.observe.metrics import RouterMetrics
from dualpath.router.scheduler.registry import Registry
from dualpath.router.scheduler.roles import Roles
from dualpath.router.settings import RouterSettings
from dualpath.vllm.app import add_cluster_routes, make_app
from dualpath.vllm.engine_config import make_engine_config, parse_front_end_arguments
from dualpath.vllm.front_end_settings import FrontEndSettings
from dualpath.vllm.frontend import DualPathLLM
from dualpath_lab.models.random_models import END_ID

REPLY = "The storage holds the cache, block by block."
BLOCK_TOKENS = 64


class SettableRegistry(Registry):
    """A registry with live roles that a test sets."""

    def __init__(self):
        super().__init__()
        self.live_roles = set(Role)

    def alive(self, role=None):
        return [each for each in self.live_roles if role in (None, each)]


class ScriptedService:
    """Streams ``reply`` token by token; ``fail_after`` tokens it raises ``error`` instead."""

    settings = RouterSettings()

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.registry = SettableRegistry()
        self.metrics = RouterMetrics(self.registry, dict)
        self.dashboard = Dashboard(
            self.registry, self.metrics, time.monotonic, lambda: Load((), 0, 0, ())
        )
        self.reset()

    def reset(self):
        self.reply = REPLY
        self.error = None
        self.fail_after = 0
        self.endless = False
        #: Tokens after which the service waits until this is set; ``held`` once it waits.
        self.hold_before = None
        self.goes_on, self.held = threading.Event(), threading.Event()
        self.jobs = []
        self.hinted = []
        self.closed = threading.Event()
        self.registry.live_roles = set(Role)
        self.registry.mode = Mode.DUALPATH

    def turned_away(self):
        return None

    def retry_after_s(self):
        return 1

    def unready(self):
        return missing_engines(self.registry)

    @property
    def scheduler(self):
        return ScriptedScheduler()

    async def hint_session(self, tenant, session_id, hints):
        self.hinted.append((tenant, session_id, hints))
        return session_id == "agent-1"

    async def drain(self, clients_gone=None):
        pass

    def status(self):
        return {"mode": "dualpath", "engines": []}

    async def scrape(self):
        return b"# TYPE dualpath:requests counter\ndualpath:requests 7\n"

    async def submit(self, job):
        self.jobs.append(job)
        try:
            tokens = [*self.tokenizer.encode(self.reply, add_special_tokens=False), END_ID]
            for index in range(1 << 30 if self.endless else len(tokens)):
                await asyncio.sleep(0)
                if index == self.hold_before:
                    self.held.set()
                    await asyncio.to_thread(self.goes_on.wait, GUARD_S)
                if index == 0:
                    job.payload.prompt_logprobs = self._prompt_logprobs(job)
                if self.error is not None and index == self.fail_after:
                    raise self.error
                yield self._event(job, tokens[index % (len(tokens) - 1)], index, len(tokens))
                if index + 1 == job.max_new_tokens:
                    return
        finally:
            self.closed.set()

    def _event(self, job, token, index, length):
        last = index == length - 1 and not self.endless
        reason = "length" if index + 1 == job.max_new_tokens else None
        return TokenEvent(
            token_ids=(END_ID if last else token,),
            finish_reason="stop" if last else reason,
            payload=self._logprobs(job, END_ID if last else token),
            cached_tokens=BLOCK_TOKENS if index == 0 and len(job.keys) > 0 else None,
            cached_by_source={HitPlace.DE_STORAGE: BLOCK_TOKENS},
        )

    def _prompt_logprobs(self, job):
        """As an engine's: for all positions of the prompt but the first."""
        asked, tokens = job.payload.sampling.prompt_logprobs, job.prompt_token_ids[1:]
        if asked is None or not tokens:
            return None
        others = list(range(300, 300 + asked))
        return LogprobsTensors(
            torch.tensor([[token, *others] for token in tokens]),
            torch.tensor([[-0.25, *(-1.0 - n for n in range(asked))] for _ in tokens]),
            torch.tensor([1 for _ in tokens]),
        )

    def _logprobs(self, job, token):
        asked = job.payload.sampling.logprobs
        if asked is None:
            return None
        others = list(range(300, 300 + asked))
        return LogprobsLists(
            np.array([[token, *others]]),
            np.array([[-0.5, *(-1.0 - n for n in range(asked))]]),
            np.array([1]),
        )


class ScriptedScheduler:
    """What is asked of a cluster in this module."""

    dashboard = weights = None

    @property
    def roles(self):
        return Roles(Registry(), time.monotonic, 1.0)

    def pause_engine(self, engine_id, *, paused):
        return engine_id == "pe-0"


class Endpoint:
    """The application on a port of its own, on an event loop of its own."""

    def __init__(self, model):
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run(model)), daemon=True)
        self.thread.start()
        assert self.ready.wait(GUARD_S)

    async def _run(self, model):
        settings = FrontEndSettings(
            model=str(model),
            dtype="float32",
            max_model_len=2048,
            served_model_names=("tiny",),
            block_tokens=BLOCK_TOKENS,
            vllm_args=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        )
        self.args = args = parse_front_end_arguments(settings)
        config = make_engine_config(args)
        self.service = ScriptedService(None)
        self.llm = DualPathLLM(config, self.service, block_tokens=BLOCK_TOKENS)
        self.service.tokenizer = self.tokenizer = self.llm.get_tokenizer()
        app = await make_app(self.llm, self.service, args)
        add_cluster_routes(app, self.service.scheduler)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        self.ready.set()
        await self.server.serve(sockets=[listener])
        await self.llm.aclose()

    def get(self, path):
        try:
            with closing(urllib.request.urlopen(self.url + path, timeout=GUARD_S)) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def stop(self):
        self.server.should_exit = True
        self.thread.join(GUARD_S)
        assert not self.thread.is_alive()
