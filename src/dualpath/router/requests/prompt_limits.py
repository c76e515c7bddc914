"""How long a prompt may be, and of which tokens; asked before anything is computed of it."""

from collections.abc import Sequence

from dualpath.core.errors import BadRequestError, PromptTooLongError
from dualpath.router.engines import KnownEngines
from dualpath.router.settings import RouterSettings

#: As in vLLM.
LARGEST_SALT_CHARACTERS = 128


def check_prompt(prompt_tokens: int, settings: RouterSettings, engines: KnownEngines) -> None:
    """Raise ``PromptTooLongError`` for one longer than the settings or the engines allow."""
    limits = {
        "max_prompt_tokens": settings.max_prompt_tokens,
        "the model's context": engines.limit("max_model_len"),
        "the draft model's context": engines.limit("max_prompt_tokens"),
    }
    for name, limit in limits.items():
        if limit is not None and prompt_tokens > limit:
            raise PromptTooLongError(
                f"the prompt has {prompt_tokens} tokens, {name} allows {limit}; shorten it"
            )


def check_salt(salt: str | None) -> None:
    """Raise ``BadRequestError`` for a cache salt that keeps nobody apart or cannot be hashed.

    An empty one would share the blocks of requests without a salt.
    """
    if salt is None:
        return
    if not 1 <= len(salt) <= LARGEST_SALT_CHARACTERS:
        raise BadRequestError(
            f"cache_salt has {len(salt)} characters; send 1 to {LARGEST_SALT_CHARACTERS}, or none "
            "to share blocks with everybody"
        )
    try:
        salt.encode()
    except UnicodeEncodeError as error:
        raise BadRequestError(f"cache_salt is no text: {error}; send valid Unicode") from error


def check_token_ids(token_ids: Sequence[int], engines: KnownEngines) -> None:
    """Raise ``BadRequestError`` for a number that is no token of the model."""
    vocab_size = engines.limit("vocab_size")
    if not token_ids or vocab_size is None:
        return
    for token in (min(token_ids), max(token_ids)):
        if not 0 <= token < vocab_size:
            raise BadRequestError(
                f"token id {token} is outside the vocabulary, 0 to {vocab_size - 1}; send tokens "
                "of this model"
            )
