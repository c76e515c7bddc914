"""The image identifiers in keys, what engines receive, and which images are refused."""

import base64

import pytest

pytest.importorskip("vllm")

import torch
from vllm.entrypoints.scale_out.token_in_token_out.mm_features import mm_kwargs_from_features
from vllm.entrypoints.scale_out.token_in_token_out.protocol import MultiModalFeatures
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from dualpath.core.errors import BadRequestError
from dualpath.vllm.engine_core import check_encoder_cache, features_on_wire, image_inputs


def pixels(seed):
    return torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(seed))


def feature(seed=1, offset=3, length=40, called="u", **changes):
    elem = MultiModalFieldElem(data=pixels(seed), field=MultiModalBatchedField())
    fields = {
        "data": MultiModalKwargsItem({"pixel_values": elem}),
        "modality": "image",
        "identifier": called,
        "mm_position": PlaceholderRange(offset=offset, length=length),
        "mm_hash": called,
    }
    return MultiModalFeatureSpec(**{**fields, **changes})


def test_an_image_is_named_by_its_values_whatever_a_client_calls_it():
    one, same, other = image_inputs(
        [feature(1, called="a"), feature(1, 50, called="b"), feature(2, 99, called="a")]
    )
    assert one.name == same.name != other.name
    assert len(base64.b64decode(one.data)) > pixels(1).nbytes
    assert [i.item.first_token for i in (one, same, other)] == [3, 50, 99]
    assert one.item.identifier == one.name


def test_an_adapter_of_the_encoder_prefixes_the_name_as_in_engines():
    (image,) = image_inputs([feature(called="a", identifier="sql:a", mm_hash="a")])
    assert image.item.identifier == f"sql:{image.name}"


def test_vllm_reads_the_features_that_engines_receive():
    sent = image_inputs([feature(1), feature(2, 50)])
    features = MultiModalFeatures.model_validate(features_on_wire(sent))
    assert features.mm_hashes == {"image": [image.name for image in sent]}
    assert [(p.offset, p.length) for p in features.mm_placeholders["image"]] == [(3, 40), (50, 40)]
    for seed, item in zip((1, 2), mm_kwargs_from_features(features)["image"], strict=True):
        assert item is not None
        assert torch.equal(item["pixel_values"].data, pixels(seed))
    assert features_on_wire(()) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"modality": "video"},
        {"data": None},
        {"mm_position": PlaceholderRange(0, 3, is_embed=torch.tensor([False, True, True]))},
    ],
)
def test_unsupported_parts_are_refused(changes):
    with pytest.raises(BadRequestError):
        image_inputs([feature(**changes)])


def test_images_beyond_the_encoder_cache_are_refused():
    """It computes whole blocks: it would wait for ever within the block that needs both."""
    apart = image_inputs([feature(1, 0, 64), feature(2, 64, 64)])
    together = image_inputs([feature(1, 0, 60), feature(2, 60, 64)])
    check_encoder_cache((), 64, 0)
    check_encoder_cache(apart, 64, 64)
    check_encoder_cache(together, 64, 124)
    with pytest.raises(BadRequestError, match=r"one block of 64 tokens needs images of 124 tokens"):
        check_encoder_cache(together, 64, 123)
