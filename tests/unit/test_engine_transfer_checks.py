"""The transfer of a request is checked before it is used as an index."""

from typing import Any

import msgspec
import pytest

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.errors import BadRequestError, IncompatibleError
from dualpath.core.modes import Mode
from dualpath.core.runs import BlockRun, HitRun
from dualpath.core.transfers import DecodeTransfer, PrefillTransfer, to_transfer_params
from dualpath.engine.control.transfer_checks import TransferChecks, with_own_hits
from dualpath.engine.settings import EngineSettings

GEOMETRY = BlockGeometry.uniform(layers=2, block_tokens=4, layer_block_bytes=64)
BUFFER_SLOTS = 8
TOKENS = 4 * GEOMETRY.block_tokens
PREFILL = PrefillTransfer(
    request_id="r",
    prompt_tokens=TOKENS,
    hit_blocks=3,
    hit_key_tail=b"c",
    hits=(
        HitRun(side=Role.PREFILL, blocks=BlockRun(0, 2), slots=(7, 0)),
        HitRun(side=Role.DECODE, blocks=BlockRun(2, 1), slots=(90,)),
    ),
    decode_engine="de-0",
    decode_epoch="e",
    de_slots=(88, 89, 90, 91),
)
DECODE = DecodeTransfer(request_id="r", prompt_tokens=TOKENS, slots=(0, 1, 2, 7))


def checks(
    role: Role, mode: Mode = Mode.DUALPATH, geometry: BlockGeometry = GEOMETRY
) -> TransferChecks:
    settings = EngineSettings(
        role=role,
        engine_id="e",
        router="tcp://h:1",
        api_url="http://h:2",
        storage="s",
        mode=mode,
        buffer_bytes=BUFFER_SLOTS * GEOMETRY.full_block_bytes,
    )
    return TransferChecks(settings, geometry)


def test_transfers_of_the_router_are_valid() -> None:
    for role, transfer in ((Role.PREFILL, PREFILL), (Role.DECODE, DECODE)):
        made = checks(role)
        assert made.carried(to_transfer_params(transfer)) == transfer
        made.check(transfer, TOKENS)
        made.check(transfer, TOKENS + 1)


IN_HBM = DecodeTransfer(
    "r", TOKENS, (), hits=(HitRun(Role.DECODE, BlockRun(1, 2), (4, 7)),), in_hbm=True
)


def test_transfers_of_a_hand_over_in_hbm_are_valid() -> None:
    blocks = tuple(range(1000, 1004))
    prefill = msgspec.structs.replace(PREFILL, de_slots=(), de_hbm_blocks=blocks)
    for role, transfer in ((Role.PREFILL, prefill), (Role.DECODE, IN_HBM)):
        made = checks(role)
        assert made.carried(to_transfer_params(transfer)) == transfer
        made.check(transfer, TOKENS)


@pytest.mark.parametrize(
    ("transfer", "named"),
    [
        (msgspec.structs.replace(PREFILL, de_hbm_blocks=(1, 2, 3, 4)), "de_slots are .* 0 of"),
        (
            msgspec.structs.replace(PREFILL, de_slots=(), de_hbm_blocks=(1, 2, 3)),
            r"de_hbm_blocks are \[1, 2, 3\], 4 of",
        ),
        (msgspec.structs.replace(IN_HBM, slots=(1, 2, 3, 4)), "slots are .* 0 of a buffer"),
        (
            msgspec.structs.replace(
                IN_HBM, hits=(HitRun(Role.DECODE, BlockRun(1, 2), (4, BUFFER_SLOTS)),)
            ),
            "2 of a buffer of 8",
        ),
        (
            msgspec.structs.replace(IN_HBM, hits=(HitRun(Role.PREFILL, BlockRun(0, 1), (1,)),)),
            "hits at block 0 of the prefill engine",
        ),
        (msgspec.structs.replace(IN_HBM, hits=IN_HBM.hits * 2), "decode engine from block 3 on"),
        (
            msgspec.structs.replace(IN_HBM, hits=(HitRun(Role.DECODE, BlockRun(3, 1), (1,)),)),
            "4 hit blocks, of at most 3",
        ),
        (msgspec.structs.replace(IN_HBM, hit_key_tail=b"k"), "whole prompt with its KV in HBM"),
    ],
)
def test_a_hand_over_in_hbm_that_fits_neither_prompt_nor_buffer_is_named(
    transfer: PrefillTransfer | DecodeTransfer, named: str
) -> None:
    role = Role.PREFILL if isinstance(transfer, PrefillTransfer) else Role.DECODE
    with pytest.raises(BadRequestError, match=named):
        checks(role).check(transfer, TOKENS)


def test_a_request_without_a_transfer_carries_none() -> None:
    assert checks(Role.PREFILL).carried(None) is None
    assert checks(Role.PREFILL).carried({"do_remote_decode": True}) is None


def test_the_other_roles_transfer_is_refused_as_is_a_malformed_one() -> None:
    with pytest.raises(BadRequestError, match="a decode engine needs a DecodeTransfer"):
        checks(Role.DECODE).carried(to_transfer_params(PREFILL))
    with pytest.raises(BadRequestError, match="a prefill engine needs a PrefillTransfer"):
        checks(Role.PREFILL).carried(to_transfer_params(DECODE))
    for tenant in ("a" * 15, "A" * 16, "é" * 16, "a" * 16 + "\n"):
        with pytest.raises(IncompatibleError, match="malformed"):
            checks(Role.DECODE).carried(
                to_transfer_params(msgspec.structs.replace(DECODE, tenant=tenant))
            )
    with pytest.raises(IncompatibleError, match="malformed"):
        checks(Role.PREFILL).carried({"dualpath": {"prefill_transfer": {"request_id": 7}}})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompt_tokens": 0}, "16 tokens for a prompt of 0"),
        ({"prompt_tokens": TOKENS + 1}, "16 tokens for a prompt of 17"),
        ({"de_slots": (1, 2, 3)}, "4 of a buffer of"),
        ({"de_slots": (1, 2, 3, -1)}, "4 of a buffer of"),
        ({"hit_blocks": 4}, "4 hit blocks for a prompt of 16 tokens"),
        ({"hit_blocks": -1}, "-1 hit blocks"),
        ({"hit_blocks": 2}, "3 blocks are in buffers, 2 are hit"),
        ({"hits": PREFILL.hits[:1]}, "2 blocks are in buffers, 3 are hit"),
        ({"hits": PREFILL.hits[1:]}, "begins at block 2, block 0 is next"),
        (
            {"hits": (HitRun(Role.PREFILL, BlockRun(0, 3), (0, 1, BUFFER_SLOTS)),)},
            "a buffer of 8 are needed",
        ),
    ],
)
def test_a_prefill_transfer_that_fits_neither_prompt_nor_buffer_is_named(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadRequestError, match=named):
        checks(Role.PREFILL).check(msgspec.structs.replace(PREFILL, **changes), TOKENS)


@pytest.mark.parametrize(("window_tokens", "whole_from"), [(1, 3), (4, 2), (6, 1), (100, 0)])
def test_nothing_is_computed_on_window_layers_that_were_not_read(
    window_tokens: int, whole_from: int
) -> None:
    """Of three hit blocks of 4 tokens; a run may lack the windows of those before them only."""
    windows = (window_tokens, *[0] * (GEOMETRY.layers - 1))
    windowed = checks(
        Role.PREFILL, geometry=msgspec.structs.replace(GEOMETRY, layer_windows=windows)
    )
    for block in range(4):
        hits = tuple(run.whole_behind(block) for run in PREFILL.hits)
        transfer = msgspec.structs.replace(PREFILL, hits=hits)
        if block <= whole_from:
            windowed.check(transfer, TOKENS)
            continue
        named = f"block {whole_from} is in a buffer without .* from block {whole_from} on"
        with pytest.raises(BadRequestError, match=named):
            windowed.check(transfer, TOKENS)
    # Without windows no layers can be missing.
    odd = msgspec.structs.replace(PREFILL, hits=tuple(r.whole_behind(1) for r in PREFILL.hits))
    with pytest.raises(BadRequestError, match="from block 0 on"):
        checks(Role.PREFILL).check(odd, TOKENS)


@pytest.mark.parametrize("slots", [(), (0, 1, 2), (0, 1, 2, BUFFER_SLOTS), (-1, 0, 1, 2)])
def test_a_decode_transfer_has_a_slot_of_the_buffer_for_every_block(
    slots: tuple[int, ...],
) -> None:
    with pytest.raises(BadRequestError, match="4 of a buffer of 8 are needed"):
        checks(Role.DECODE).check(msgspec.structs.replace(DECODE, slots=slots), TOKENS)


def test_without_bytes_to_move_there_are_no_slots() -> None:
    oracle = checks(Role.DECODE, Mode.ORACLE)
    oracle.check(msgspec.structs.replace(DECODE, slots=()), TOKENS)
    with pytest.raises(BadRequestError, match="0 of a buffer of 8"):
        oracle.check(DECODE, TOKENS)


def test_hits_count_only_under_the_prompts_own_last_key() -> None:
    assert with_own_hits(PREFILL, [b"a", b"b", b"c", b"d"]) == PREFILL
    for keys in ([b"a", b"b", b"x"], [b"a", b"b"], []):
        without = with_own_hits(PREFILL, keys)
        assert (without.hit_blocks, without.hits, without.hit_key_tail) == (0, (), b"")
        assert without.de_slots == PREFILL.de_slots
