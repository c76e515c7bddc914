"""Measurements of one engine by the profiler; the catalog fits a model's costs to them."""

import msgspec

from dualpath.policy.batching import AttentionGeometry


class PassTime(msgspec.Struct, frozen=True):
    """The time of a forward pass that computed ``bsz`` tokens after ``cached`` tokens."""

    cached: int
    bsz: int
    seconds: float


class StepTime(msgspec.Struct, frozen=True):
    """The time of a decode step of ``requests`` requests with mean context ``context_tokens``."""

    requests: int
    context_tokens: float
    seconds: float


class EngineFacts(msgspec.Struct, frozen=True):
    """Properties of the engine and its model.

    ``device`` and ``software`` only inform the reader of the file.
    """

    model: str
    layers: int
    kv_bytes_per_token: float
    context_limit_tokens: int
    attention: AttentionGeometry
    device: str
    software: str


class Measurement(msgspec.Struct, frozen=True):
    """All measurements of one profiling run."""

    facts: EngineFacts
    passes: tuple[PassTime, ...]
    steps: tuple[StepTime, ...]
