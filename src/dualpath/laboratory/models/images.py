"""A tiny multimodal model with random weights: BLIP-2's vision part and Qwen2.

BLIP-2 is used because vLLM's modules for LLaVA and Qwen2.5-VL import torchvision, which is not a
dependency of this project. The weights are float32, as in the other tiny models (`tiny.py`). A
prompt has at most one image, before its text; the image takes `IMAGE_TOKENS` tokens.
"""

from pathlib import Path

from dualpath.laboratory.models.prepared import prepare_random
from dualpath.laboratory.models.tiny import VOCABULARY_TOKENS, tiny_config, train_tokenizer

IMAGE_MODEL_VERSION = 1
IMAGE_MODEL_LAYERS = 4
#: Not a whole number of blocks, so that one block contains image and text.
IMAGE_TOKENS = 40
#: The placeholder token of images, after those of the tokenizer.
IMAGE_TOKEN, IMAGE_TOKEN_ID = "<image>", VOCABULARY_TOKENS
_IMAGE_PIXELS = 56


def make_tiny_image_model(directory: Path | None = None, seed: int = 0) -> Path:
    """Return the folder of a random model with images; created by the first call.

    Args:
        directory: where to write; default: a directory in `cache_directory()`.
        seed: seed of the weights; the same seed gives the same bytes.

    Raises:
        ConfigError: `directory` cannot be used.
    """
    name = f"tiny-blip2-{IMAGE_MODEL_LAYERS}-layers-seed-{seed}"
    return prepare_random(
        name, IMAGE_MODEL_VERSION, directory, lambda empty: _write_image_model(empty, seed)
    )


def _write_image_model(directory: Path, seed: int) -> None:
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
    text = tiny_config("qwen2", IMAGE_MODEL_LAYERS)
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
