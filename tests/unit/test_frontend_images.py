"""What the front end does with clients' images only if configured."""

import pytest

pytest.importorskip("vllm")

from vllm.multimodal.media import MediaConnector

from dualpath.vllm.engine_config import NO_MEDIA_DOMAIN, parse_front_end_arguments
from dualpath.vllm.front_end_settings import FrontEndSettings


def parsed(*vllm_args):
    return parse_front_end_arguments(FrontEndSettings(model="m", vllm_args=vllm_args))


def test_images_are_not_fetched_cached_or_accepted_without_limit():
    args = parsed()
    assert args.limit_mm_per_prompt == {"image": 16, "video": 0, "audio": 0}
    assert args.mm_processor_cache_gb == 0
    assert args.enable_prefix_caching is False  # With neither, identifiers are of one request.
    connector = MediaConnector(allowed_media_domains=args.allowed_media_domains)
    for url in ("http://127.0.0.1/x.png", "https://example.org/x.png"):
        with pytest.raises(ValueError, match=NO_MEDIA_DOMAIN):
            connector.fetch_image(url)
    with pytest.raises((RuntimeError, ValueError)):
        connector.fetch_image("file:///etc/hostname")


def test_an_operator_may_allow_more():
    args = parsed("--allowed-media-domains", "example.org", "--limit-mm-per-prompt", '{"image": 2}')
    assert args.allowed_media_domains == ["example.org"]
    assert args.limit_mm_per_prompt == {"image": 2}
