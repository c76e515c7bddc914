"""A tiny model that sees images, with random weights: BLIP-2's architecture before Qwen2's.

BLIP-2, since what vLLM needs for it is here: LLaVA's and Qwen2.5-VL's modules import torchvision,
which is no dependency of this project. Float32, as the other tiny models are (`tiny.py`). A prompt
has one image at most, before its text, which takes `IMAGE_TOKENS` tokens.
"""

from pathlib import Path

from dualpath.laboratory.models.prepared import prepare_random
from dualpath.laboratory.models.tiny import VOCABULARY_TOKENS, tiny_config, train_tokenizer

GENERATOR_VERSION = 1
LAYERS = 4
#: No whole number of blocks, so that one block has image and text.
IMAGE_TOKENS = 40
#: The token in an image's place, after those of the tokenizer.
IMAGE_TOKEN, IMAGE_TOKEN_ID = "<image>", VOCABULARY_TOKENS
_IMAGE_PIXELS = 56


def make_tiny_image_model(directory: Path | None = None, seed: int = 0) -> Path:
    """Return the folder of a random model that sees images; made on the first call.

    Args:
        directory: where to write; default: a directory in `cache_directory()`.
        seed: of the weights; the same seed gives the same bytes.

    Raises:
        ConfigError: `directory` cannot be used.
    """
    name = f"tiny-blip2-{LAYERS}-layers-seed-{seed}"
    return prepare_random(name, GENERATOR_VERSION, directory, lambda empty: _write(empty, seed))


def _write(directory: Path, seed: int) -> None:
    import torch
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
    )
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    tokenizer = train_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    text = tiny_config("qwen2", LAYERS)
    text.vocab_size = VOCABULARY_TOKENS + 16
    text.architectures = ["Qwen2ForCausalLM"]
    vision = Blip2VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=_IMAGE_PIXELS,
        patch_size=14,
        initializer_range=0.3,
    )
    queries = Blip2QFormerConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        encoder_hidden_size=64,
        vocab_size=VOCABULARY_TOKENS,
        initializer_range=0.3,
    )
    config = Blip2Config(
        text_config=text,
        vision_config=vision,
        qformer_config=queries,
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=IMAGE_TOKEN_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Blip2ForConditionalGeneration(config).float()
        torch.nn.init.normal_(model.query_tokens)
    model.save_pretrained(directory)
    side = {"height": _IMAGE_PIXELS, "width": _IMAGE_PIXELS}
    processor = Blip2Processor(
        BlipImageProcessorPil(size=side), tokenizer, num_query_tokens=IMAGE_TOKENS
    )
    processor.save_pretrained(directory)
