"""Small files are whole or absent, and say clearly what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.files import FileUnreadable, read_json, write_atomically
from everstep.paths import Endpoint

ENDPOINT = Endpoint(url="http://127.0.0.1:1", term=1, pid=2)


def test_what_is_written_is_read_back_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "endpoint.json"
    write_atomically(path, ENDPOINT)
    assert read_json(path, Endpoint) == ENDPOINT
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "endpoint.json"
    write_atomically(path, ENDPOINT)
    beyond = tmp_path / "occupied"
    beyond.mkdir()
    with pytest.raises(OSError, match="occupied"):
        write_atomically(beyond, ENDPOINT)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["endpoint.json", "occupied"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"url": 1}', b"\xff\xfe"])
def test_a_file_that_is_not_what_it_should_be_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "endpoint.json"
    path.write_bytes(content)
    with pytest.raises(FileUnreadable, match=r"endpoint\.json is not what it should be"):
        read_json(path, Endpoint)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileUnreadable, match=r"cannot read .*endpoint\.json: No such file"):
        read_json(tmp_path / "endpoint.json", Endpoint)
