"""Our keys are vLLM's own block hashes: of text, of images, with an adapter, with a salt."""

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from dualpath.core.blocks import KeyExtras, PromptItem
from dualpath.core.key_cache import Adapter, KeyCache

BLOCK_TOKENS = 32
TOKENS = list(range(3, 3 + 150))
ADAPTER = Adapter("sql", "/adapters/sql", "d" * 64)
LORA = LoRARequest("sql", 7, "/adapters/sql")
#: Image ranges: over two blocks, within one, up to a block's end, and two in one block.
IMAGES = (
    PromptItem("aa", 10, 40),
    PromptItem("bb", 70, 20),
    PromptItem("aa", 90, 6),
    PromptItem("cc", 97, 3),
    PromptItem("dd", 101, 27),
)


@pytest.fixture(autouse=True)
def hashed_as_engines_do(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    kv_cache_utils.init_none_hash(sha256_cbor)


def hashes(items=(), **fields):
    """The keys an engine uses for the blocks of a request."""
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=item.identifier,
            mm_position=PlaceholderRange(offset=item.first_token, length=item.tokens),
        )
        for item in items
    ]
    request = Request(
        request_id="r",
        prompt_token_ids=TOKENS,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        mm_features=features or None,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, sha256_cbor),
        **fields,
    )
    return [bytes(each) for each in request.block_hashes]


def keys(extras):
    return KeyCache(BLOCK_TOKENS).keys(TOKENS, extras)


@pytest.mark.parametrize("salt", [None, "tenant"])
@pytest.mark.parametrize("items", [(), IMAGES[:1], IMAGES])
def test_keys_are_the_engines(salt, items):
    assert keys(KeyExtras(cache_salt=salt, items=items)) == hashes(items, cache_salt=salt)
    engines = hashes(items, cache_salt=ADAPTER.salt(salt), lora_request=LORA)
    assert keys(ADAPTER.extras(salt, items)) == engines


def test_another_adapter_path_weight_or_image_shares_no_block():
    variants = [
        KeyExtras(),
        ADAPTER.extras(None),
        ADAPTER.extras("tenant"),
        Adapter("sql", "/adapters/sql", "e" * 64).extras(None),
        Adapter("sql", "/other", "d" * 64).extras(None),
        Adapter("chat", "/adapters/sql", "d" * 64).extras(None),
        KeyExtras(cache_salt="d" * 64),
        KeyExtras(items=(PromptItem("aa", 0, 5),)),
        KeyExtras(items=(PromptItem("bb", 0, 5),)),
        KeyExtras(items=(PromptItem("aa", 1, 5),)),
    ]
    found = [set(keys(extras)) for extras in variants]
    assert len(set().union(*found)) == len(variants) * (len(TOKENS) // BLOCK_TOKENS)
