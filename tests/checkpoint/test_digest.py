"""The digest: what it is, and that no flipped bit and no misplaced byte leaves it as it was."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.digest import SUMMED_BYTES, digest_of
from tests.checkpoint.plain import digest

SIZES = st.one_of(
    st.integers(0, 40),
    st.integers(0, 5 * SUMMED_BYTES),
    st.integers(0, 5).map(lambda pages: pages * SUMMED_BYTES),
)


def payload_of(size: int, seed: int) -> bytearray:
    return bytearray(random.Random(seed).randbytes(size))


def of(payload: bytearray, threads: int = 1) -> int:
    return digest_of(memoryview(payload), threads)


@given(size=SIZES, seed=st.integers(0, 99), threads=st.integers(1, 5))
def test_it_is_what_plain_python_makes_of_it_with_any_number_of_threads(
    size: int, seed: int, threads: int
) -> None:
    payload = payload_of(size, seed)
    assert of(payload, threads) == digest(bytes(payload))


@given(data=st.data(), size=SIZES.filter(bool), seed=st.integers(0, 99))
def test_any_flipped_bit_changes_it(data: st.DataObject, size: int, seed: int) -> None:
    payload = payload_of(size, seed)
    before = of(payload)
    payload[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert of(payload) != before


@given(data=st.data(), pages=st.integers(2, 6), rest=st.integers(0, 100))
def test_pages_that_changed_places_change_it(data: st.DataObject, pages: int, rest: int) -> None:
    payload = payload_of(pages * SUMMED_BYTES + rest, 1)
    before = of(payload)
    one, other = data.draw(
        st.tuples(st.integers(0, pages - 1), st.integers(0, pages - 1)).filter(
            lambda pair: pair[0] != pair[1]
        )
    )
    a, b = (slice(n * SUMMED_BYTES, (n + 1) * SUMMED_BYTES) for n in (one, other))
    payload[a], payload[b] = payload[b], payload[a]
    assert of(payload) != before


@pytest.mark.parametrize("size", [0, 1, SUMMED_BYTES - 1, SUMMED_BYTES, 3 * SUMMED_BYTES])
def test_missing_or_added_zeros_change_it(size: int) -> None:
    lengths = [size, size + 1, size + 8, size + SUMMED_BYTES]
    assert len({of(bytearray(length)) for length in lengths}) == len(lengths)
