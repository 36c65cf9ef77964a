"""Public ids: layout, spelling, and what the check character finds, counted over every single case."""

from __future__ import annotations

import random
from itertools import combinations
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import ConfigurationError, InvalidKey
from semel.ids import PublicId, mint, parse, public_id

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
KINDS = st.from_regex(r"[a-z][a-z0-9]{0,19}", fullmatch=True)
GOLDEN = "ord_01hf7yat00fzzvzzzzzzzzzzzzq"


def sample(count: int) -> list[PublicId]:
    source = random.Random(25)
    return [mint("ord", source.getrandbits(48), source.randbytes(10)) for _ in range(count)]


def is_refused(text: str, kind: str | None = None) -> bool:
    try:
        parse(text, kind)
    except InvalidKey:
        return True
    return False


@given(KINDS, st.integers(0, 2**48 - 1), st.binary(min_size=10, max_size=10))
def test_R25_an_id_gives_back_its_kind_bytes_uuid_and_time(kind: str, unix_ms: int, noise: bytes) -> None:
    minted = mint(kind, unix_ms, noise)
    parsed = parse(minted.text, kind)
    assert parsed == minted
    assert (parsed.kind, parsed.type, len(parsed.bytes), parsed.unix_ms) == (kind, kind, 16, unix_ms)
    assert parsed.uuid == UUID(bytes=parsed.bytes)
    assert (parsed.uuid.version, parsed.uuid.variant) == (7, "specified in RFC 4122")
    assert str(parsed) == minted.text
    assert len(minted.text) == len(kind) + 1 + 26 + 1


@given(KINDS, st.uuids())
def test_R25_any_uuid_can_be_given_a_public_form(kind: str, value: UUID) -> None:
    made = public_id(kind, value)
    assert parse(made.text).uuid == value
    assert made == public_id(kind, value.bytes)


@given(
    st.lists(
        st.tuples(st.integers(0, 2**48 - 1), st.binary(min_size=10, max_size=10)), min_size=2, max_size=8
    )
)
def test_ids_sort_as_text_the_way_their_times_do(moments: list[tuple[int, bytes]]) -> None:
    ids = [mint("ord", unix_ms, noise) for unix_ms, noise in moments]
    by_text = sorted(ids, key=lambda minted: minted.text[:-1])
    assert [minted.bytes for minted in by_text] == sorted(minted.bytes for minted in ids)
    assert [minted.unix_ms for minted in by_text] == sorted(unix_ms for unix_ms, _ in moments)


def test_R25_the_spelling_of_an_id_does_not_change_between_versions() -> None:
    assert mint("ord", 1_700_000_000_000, b"\xff" * 10).text == GOLDEN
    assert str(parse(GOLDEN).uuid) == "018bcfe5-6800-7fff-bfff-ffffffffffff"


def test_every_single_wrong_character_is_found() -> None:
    tried = 0
    for minted in sample(20):
        for at in range(4, len(minted.text)):
            for char in ALPHABET:
                if char != minted.text[at]:
                    tried += 1
                    assert is_refused(minted.text[:at] + char + minted.text[at + 1 :])
    assert tried == 20 * 27 * 31


def test_every_swap_of_two_different_characters_is_found() -> None:
    tried = 0
    for minted in sample(60):
        for a, b in combinations(range(4, len(minted.text)), 2):
            chars = list(minted.text)
            chars[a], chars[b] = chars[b], chars[a]
            if chars[a] != chars[b]:
                tried += 1
                assert is_refused("".join(chars))
    assert tried > 15_000


def test_two_wrong_characters_are_found_about_31_times_in_32() -> None:
    source = random.Random(7)
    missed = tried = 0
    for minted in sample(4000):
        a, b = source.sample(range(5, len(minted.text)), 2)
        chars = list(minted.text)
        for at in (a, b):
            chars[at] = source.choice([c for c in ALPHABET if c != chars[at]])
        tried += 1
        missed += not is_refused("".join(chars))
    assert missed / tried < 0.05


def test_a_body_under_another_kind_is_found_mostly_and_always_when_the_kind_is_asked_for() -> None:
    kinds = [a + b + c for a in "abcdeuvw" for b in "nrst" for c in "dkmz129"]
    moved = [kind + minted.text[3:] for minted in sample(20) for kind in kinds if kind != "ord"]
    assert sum(map(is_refused, moved)) / len(moved) > 0.94
    assert all(is_refused(text, "ord") for text in moved)


def test_upper_case_and_look_alikes_are_read_and_spelled_canonically() -> None:
    assert parse(GOLDEN.upper()).text == GOLDEN
    typed = "ord_" + GOLDEN[4:].replace("0", "O").replace("1", "l")
    assert parse(typed).text == GOLDEN
    assert parse(typed.replace("l", "I")).text == GOLDEN


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "no public id"),
        ("01hf7yat00fzzvzzzzzzzzzzzzq", "no public id"),
        ("_01hf7yat00fzzvzzzzzzzzzzzzq", "no public id"),
        ("o-d_01hf7yat00fzzvzzzzzzzzzzzzq", "no public id"),
        ("a" * 21 + GOLDEN[3:], "no public id"),
        (GOLDEN.replace("k", "K").replace("0", "٠"), "no public id"),
        (GOLDEN[:-1], "26 characters after ord_, it must have 27"),
        (GOLDEN + "0", "28 characters after ord_"),
        (GOLDEN[:10] + "u" + GOLDEN[11:], "position 10"),
        (GOLDEN[:10] + "-" + GOLDEN[11:], "position 10"),
        ("ord_8" + GOLDEN[5:], "mistyped"),
        (GOLDEN[:-1] + "0", "mistyped"),
    ],
)
def test_a_malformed_id_is_refused_with_its_reason(text: str, says: str) -> None:
    with pytest.raises(InvalidKey, match=says):
        parse(text)


def test_a_body_beyond_16_bytes_is_refused_even_when_its_check_character_fits() -> None:
    texts = ["ord_8" + "0" * 25 + char for char in ALPHABET]
    assert all(is_refused(text) for text in texts)


def test_R25_an_id_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(InvalidKey, match="kind 'ord', 'usr' is needed"):
        parse(GOLDEN, "usr")


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidKey, match="must be a str, not bytes"):
        parse(b"ord_")  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("kind", ["", "Ord", "1rd", "or_d", "a" * 21, "ord\n", None])
def test_a_malformed_kind_is_a_configuration_error(kind: str) -> None:
    with pytest.raises(ConfigurationError, match="1 to 20 characters"):
        mint(kind, 0, bytes(10))
    if kind is not None:
        with pytest.raises(ConfigurationError, match="1 to 20 characters"):
            parse(GOLDEN, kind)


@pytest.mark.parametrize(
    "unix_ms, noise", [(-1, bytes(10)), (2**48, bytes(10)), (0, bytes(9)), (0, bytes(11))]
)
def test_mint_refuses_a_time_or_noise_of_the_wrong_size(unix_ms: int, noise: bytes) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        mint("ord", unix_ms, noise)


def test_a_public_id_has_16_bytes() -> None:
    with pytest.raises(ConfigurationError, match="16 bytes, not 3"):
        public_id("ord", b"abc")
