"""How long a prompt may be where a draft model's KV is part of every block.

vLLM leaves a draft model out of a whole pass in which a request and the tokens that would be
proposed for it do not fit its context.  The draft's layers of that pass would then have no KV, and
nobody would say so: such prompts are refused before they are computed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def most_prompt_tokens(config: "VllmConfig") -> int | None:
    """Return how many tokens a prompt may have for its drafts to be computed; None: no such limit.

    As vLLM 0.32 decides it for each pass (``_input_fits_in_drafter``).
    """
    drafts = config.speculative_config
    if drafts is None or not (drafts.use_eagle() or drafts.uses_draft_model()):
        return None
    own = drafts.draft_model_config
    context_tokens = (own.max_model_len if own else None) or config.model_config.max_model_len
    proposed = drafts.num_speculative_tokens
    return int(context_tokens - proposed - bool(drafts.use_dflash()))
