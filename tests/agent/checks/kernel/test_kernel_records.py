"""Records of /dev/kmsg, taken apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.agent.checks.kernel.records import device_of, parse, text_of


def test_a_record_has_level_number_time_and_text() -> None:
    record = parse(
        b"30,339,5140900,-,caller=T1;systemd[1]: x\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0"
    )
    assert record is not None
    assert (record.level, record.seq, record.at) == (6, 339, 5.1409)
    assert record.body == b"systemd[1]: x"
    assert device_of(record.tail) == {"pci": "0000:3b:00.0"}


@pytest.mark.parametrize(
    "raw", [b"", b";", b"6,1;x", b"a,b,c,-;x", b"6,-1,2,-;x", b"6,1,2,-", b"\xff\xfe", b"6,1,,-;x"]
)
def test_what_is_no_record_is_none(raw: bytes) -> None:
    assert parse(raw) is None


@given(st.binary(max_size=200))
def test_nothing_breaks_it(raw: bytes) -> None:
    record = parse(raw)
    if record is not None:
        assert not set(text_of(record.body)) & {"\n", "\x1b", "\0"}
        device_of(record.tail)


def test_control_characters_cannot_reach_a_terminal() -> None:
    assert text_of(b"a\\x1b[31mb\\x0ac\\x00\\x7f") == "a [31mb c  "
    assert text_of(b"\\xc3\\xa9 \\xff") == "é �"
