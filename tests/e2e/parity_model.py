"""The tiny random model with the two tokens that reasoning parsers look for."""

import json
import shutil
from pathlib import Path

from dualpath_lab.models.random_models import make_tiny_model

THINKING_TOKENS = ("<think>", "</think>")


def thinking_model(directory: Path) -> Path:
    """Write the model; the tokenizer's last two merges make room for the new tokens."""
    shutil.copytree(make_tiny_model("qwen2"), directory)
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    by_id = {token_id: text for text, token_id in tokenizer["model"]["vocab"].items()}
    for token, token_id in zip(THINKING_TOKENS, sorted(by_id)[-2:], strict=True):
        del tokenizer["model"]["vocab"][by_id[token_id]]
        tokenizer["model"]["merges"].pop()
        tokenizer["added_tokens"].append(
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": False,
            }
        )
    file.write_text(json.dumps(tokenizer))
    return directory
