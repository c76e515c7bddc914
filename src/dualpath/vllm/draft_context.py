"""Limit on prompt length if the KV of a draft model is part of every block.

If a request and its proposed tokens do not fit the draft model's context, vLLM skips the draft
model for the whole pass.  The blocks of that pass would then lack KV of the draft's layers without
any error, so such prompts are refused before they are computed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def max_drafted_prompt_tokens(config: "VllmConfig") -> int | None:
    """Return the longest prompt in tokens that the draft model can process; None without a limit.

    The rule is vLLM 0.32's for each pass (``_input_fits_in_drafter``).
    """
    drafts = config.speculative_config
    if drafts is None or not (drafts.use_eagle() or drafts.uses_draft_model()):
        return None
    own = drafts.draft_model_config
    context_tokens = (own.max_model_len if own else None) or config.model_config.max_model_len
    proposed = drafts.num_speculative_tokens
    return int(context_tokens - proposed - bool(drafts.use_dflash()))
