"""The images of a request: their names in block keys, and their data for the engines.

The front end has converted an image to the input values of the model's vision encoder.  The SHA-256
of these values names the image in block keys and in the engines' encoder caches: equal names mean
equal input, independent of the client's name for it and of the front end's configuration.  Both
engines receive the values.  A prefill engine encodes the images of blocks that it does not hit; a
decode engine encodes images only if it has to recompute a prompt.
"""

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
from vllm.multimodal.inputs import MultiModalFeatureSpec

from dualpath.core.errors import BadRequestError
from dualpath.core.key_extras import PromptItem

IMAGE = "image"


class ImageInput(msgspec.Struct, frozen=True):
    """An image as sent to engines: ``name``, ``data`` (base64), and its ``item`` in block keys."""

    name: str
    data: str
    item: PromptItem


def image_inputs(features: Sequence[MultiModalFeatureSpec] | None) -> tuple[ImageInput, ...]:
    """Return a request's images, in the order of their tokens.

    Raises ``BadRequestError`` for parts of other kinds, and for images with other tokens between
    their own.
    """
    return tuple(_sent(feature) for feature in features or ())


def _sent(feature: MultiModalFeatureSpec) -> ImageInput:
    place = feature.mm_position
    if feature.modality != IMAGE or feature.data is None:
        raise BadRequestError(
            f"a part of kind {feature.modality!r} is not supported, only text and images are; "
            "leave it out"
        )
    if place.get_num_embeds() != place.length:
        raise BadRequestError(
            "this model puts other tokens between those of an image, which cannot be sent to "
            "engines; send text"
        )
    data = encode_mm_kwargs_item(feature.data)
    name = hashlib.sha256(base64.b64decode(data)).hexdigest()
    # vLLM prefixes the name of an image with the adapter of the vision encoder, if there is one.
    prefix = feature.identifier.removesuffix(feature.mm_hash or "")
    if prefix == feature.identifier:
        prefix = ""
    return ImageInput(name, data, PromptItem(f"{prefix}{name}", place.offset, place.length))


def check_encoder_cache(
    images: Sequence[ImageInput], block_tokens: int, encoder_tokens: int
) -> None:
    """Raise ``BadRequestError`` for images that exceed a prefill engine's encoder cache.

    A prefill engine computes whole blocks and needs all images of a block in the cache at once.
    """
    in_block: dict[int, int] = {}
    for image in images:
        for block in image.item.blocks(block_tokens):
            in_block[block] = in_block.get(block, 0) + image.item.tokens
    if (most := max(in_block.values(), default=0)) > encoder_tokens:
        raise BadRequestError(
            f"one block of {block_tokens} tokens needs images of {most} tokens, but the engines' "
            f"encoder cache holds {encoder_tokens}; send smaller images or more text between "
            "them, or raise --max-num-batched-tokens"
        )


def features_on_wire(images: Sequence[ImageInput]) -> dict[str, Any] | None:
    """Return the ``features`` of a request to an engine, None without images."""
    if not images:
        return None
    places = [{"offset": i.item.first_token, "length": i.item.tokens} for i in images]
    return {
        "mm_hashes": {IMAGE: [image.name for image in images]},
        "mm_placeholders": {IMAGE: places},
        "kwargs_data": {IMAGE: [image.data for image in images]},
    }
