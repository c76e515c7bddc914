"""The images of a request: what names them in keys, and what engines get of them.

The front end has turned an image into the values that the model's vision encoder takes.  Their
SHA-256 is the image's name, for keys and for the engines' own caches: whatever the client called
it, and however the front end is set up, equal names mean equal input.  Both engines get the values.
A prefill engine encodes what it does not hit; a decode engine encodes nothing, unless it has to
compute a prompt again.
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


class SentImage(msgspec.Struct, frozen=True):
    """An image as it goes to engines: ``name`` and ``data`` (base64), and as it enters keys."""

    name: str
    data: str
    item: PromptItem


def sent_images(features: Sequence[MultiModalFeatureSpec] | None) -> tuple[SentImage, ...]:
    """Return a request's images, in the order of their tokens.

    Raises ``BadRequestError`` for what is no image, or has tokens of its own in between.
    """
    return tuple(_sent(feature) for feature in features or ())


def _sent(feature: MultiModalFeatureSpec) -> SentImage:
    place = feature.mm_position
    if feature.modality != IMAGE or feature.data is None:
        raise BadRequestError(
            f"a part of the kind {feature.modality!r}: of what is no text only images are served; "
            "send images, or leave it out"
        )
    if place.get_num_embeds() != place.length:
        raise BadRequestError(
            "this model puts tokens of its own between those of an image, which cannot be carried "
            "to engines; send text"
        )
    data = encode_mm_kwargs_item(feature.data)
    name = hashlib.sha256(base64.b64decode(data)).hexdigest()
    # An adapter of the vision encoder stands before the name that an image has without it.
    prefix = feature.identifier.removesuffix(feature.mm_hash or "")
    if prefix == feature.identifier:
        prefix = ""
    return SentImage(name, data, PromptItem(f"{prefix}{name}", place.offset, place.length))


def check_fit(images: Sequence[SentImage], block_tokens: int, encoder_tokens: int) -> None:
    """Raise ``BadRequestError`` for images that a prefill engine could never have at once.

    It goes on by whole blocks, and needs all images of a block in its encoder's cache.
    """
    in_block: dict[int, int] = {}
    for image in images:
        for block in image.item.blocks(block_tokens):
            in_block[block] = in_block.get(block, 0) + image.item.tokens
    if (most := max(in_block.values(), default=0)) > encoder_tokens:
        raise BadRequestError(
            f"images of {most} tokens touch one block of {block_tokens}, engines hold "
            f"{encoder_tokens} of images at a time; send smaller images or more text between them, "
            "or raise --max-num-batched-tokens"
        )


def features_on_wire(images: Sequence[SentImage]) -> dict[str, Any] | None:
    """Return the ``features`` of a request to an engine, None without images."""
    if not images:
        return None
    places = [{"offset": i.item.first_token, "length": i.item.tokens} for i in images]
    return {
        "mm_hashes": {IMAGE: [image.name for image in images]},
        "mm_placeholders": {IMAGE: places},
        "kwargs_data": {IMAGE: [image.data for image in images]},
    }
