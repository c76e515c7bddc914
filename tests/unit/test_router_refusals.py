"""What the router turns away is counted by reason, and nothing else is."""

from pathlib import Path

import pytest
from tests.emulated_cluster import cluster
from tests.unit.scraped_cluster import Scrape

from dualpath.core.errors import OverloadedError
from dualpath.core.modes import Mode
from dualpath.router.refusals import (
    ControlRefusal,
    ControlRefusals,
    HttpRefusal,
    http_refusal,
)
from dualpath.router.settings import RouterSettings

PROMPT = list(range(1, 20))


def test_every_4xx_answer_has_a_reason_and_no_other_answer_has() -> None:
    reasons = {status: http_refusal(status, b"") for status in range(100, 600)}
    assert {status for status, reason in reasons.items() if reason} == set(range(400, 500))
    named = {status: r for status, r in reasons.items() if r not in (None, HttpRefusal.OTHER)}
    assert named == {
        400: HttpRefusal.BAD_REQUEST, 422: HttpRefusal.BAD_REQUEST, 401: HttpRefusal.API_KEY,
        403: HttpRefusal.FOREIGN_PAGE,
        404: HttpRefusal.NOT_FOUND, 413: HttpRefusal.BODY_SIZE, 429: HttpRefusal.OVERLOADED,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": {"param": "input_tokens", "code": 400}}', HttpRefusal.PROMPT_LENGTH),
        (b'{"error": {"param": "input_text"}}', HttpRefusal.PROMPT_LENGTH),
        (b'{"error": {"param": "temperature"}}', HttpRefusal.BAD_REQUEST),
        (b'{"error": {"param": null}}', HttpRefusal.BAD_REQUEST),
        (b'{"error": "Unauthorized"}', HttpRefusal.BAD_REQUEST),
        (b'{"error": {"param": ["input_tokens"]}}', HttpRefusal.BAD_REQUEST),
        (b'"\xff', HttpRefusal.BAD_REQUEST),
        (b"", HttpRefusal.BAD_REQUEST),
    ],
)
def test_the_error_in_the_answer_names_a_prompt_that_is_too_long(body, reason):
    assert http_refusal(400, body) is reason
    assert http_refusal(429, body) is HttpRefusal.OVERLOADED


async def test_one_of_each_at_the_light_router(tmp_path: Path, monkeypatch) -> None:
    settings = RouterSettings(
        mode=Mode.DUALPATH, max_prompt_tokens=40, max_body_bytes=4096, api_keys=("key",)
    )
    async with cluster(tmp_path, Mode.DUALPATH, router=settings) as made:

        async def status(path: str, body: object = None, key: str = "key") -> int:
            headers = {"Authorization": f"Bearer {key}"}
            url = f"{made.endpoint}{path}"
            async with made.http.post(url, json=body, headers=headers) as response:
                return response.status

        async def counted() -> dict[str, float]:
            shown = {"Authorization": "Bearer key"}
            async with made.http.get(f"{made.endpoint}/metrics", headers=shown) as response:
                scrape = Scrape(await response.text())
            name = "dualpath:http_refusals_total"
            reasons = scrape.labels(name)["reason"]
            return {reason: scrape.value(name, reason=reason) for reason in reasons}

        completions = "/v1/completions"
        served = {"prompt": PROMPT, "max_tokens": 1}
        assert await status(completions, served) == 200
        assert await counted() == dict.fromkeys(HttpRefusal, 0)
        assert await status(completions, served, key="another") == 401
        assert await status(completions, {"prompt": [1] * 3000}) == 413
        assert await status(completions, {"prompt": [1] * 41}) == 400
        assert await status(completions, {"prompt": [1, "text"]}) == 400
        assert await status(completions, {**served, "cache_salt": ""}) == 400
        assert await status("/v1/no-such-path") == 404
        assert await status("/health") == 405
        monkeypatch.setattr(made.service, "turned_away", lambda: OverloadedError("full"))
        assert await status(completions, served) == 429
        assert await counted() == {
            **dict.fromkeys(HttpRefusal, 1),
            HttpRefusal.BAD_REQUEST: 2,
            HttpRefusal.FOREIGN_PAGE: 0,  # no page has the key
        }


def test_a_peer_is_complained_about_once_however_often_it_errs() -> None:
    refusals = ControlRefusals()
    assert [refusals.count(ControlRefusal.MALFORMED) for _ in range(3)] == [1, 2, 3]
    logged = [refusals.complain(peer, at_s) for peer, at_s in ((b"a", 0), (b"a", 59), (b"b", 59))]
    assert logged == [True, False, True]
    assert refusals.complain(b"a", 60.0)
    # A peer that uses another name every time does not fill the log either.
    assert sum(refusals.complain(b"%d" % n, 61.0) for n in range(10**4)) < 20
    assert refusals.totals() == {**dict.fromkeys(ControlRefusal, 0), ControlRefusal.MALFORMED: 3}
