"""What the profiler measures of one engine; the catalog fits a model's costs to it."""

import msgspec

from dualpath.policy.batching import AttentionGeometry


class PassTime(msgspec.Struct, frozen=True):
    """A forward pass that computed ``bsz`` tokens behind ``cached`` ones, in seconds."""

    cached: int
    bsz: int
    seconds: float


class StepTime(msgspec.Struct, frozen=True):
    """A decode step of ``requests`` requests with a mean context of ``context_tokens``."""

    requests: int
    context_tokens: float
    seconds: float


class EngineFacts(msgspec.Struct, frozen=True):
    """What the engine knows of its model and of itself.

    ``device`` and ``software`` are for the reader of the file.
    """

    model: str
    layers: int
    kv_bytes_per_token: float
    context_limit_tokens: int
    attention: AttentionGeometry
    device: str
    software: str


class Measurement(msgspec.Struct, frozen=True):
    """Everything one profiling run measured."""

    facts: EngineFacts
    passes: tuple[PassTime, ...]
    steps: tuple[StepTime, ...]
