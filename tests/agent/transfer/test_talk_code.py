"""Code versions between two agents, without sockets: bytes cut, changed or ended anywhere."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.agent.transfer import talk
from everstep.agent.transfer.desk import Desk, Visit
from everstep.agent.transfer.messages import GetCode, TransferFailed
from everstep.agent.transfer.talk import Refused
from everstep.code.snapshot import take
from everstep.code.store import CodeStore
from everstep.model import VersionId
from tests.agent.transfer.ends import PEER, shared_memory
from tests.agent.transfer.test_talk import CLIENT, CUTS, SERVER, Damage, caller, run


@contextlib.contextmanager
def peer() -> Iterator[tuple[Desk, VersionId, bytes]]:
    """Who holds one version, and its archive."""
    with shared_memory() as shm, tempfile.TemporaryDirectory() as directory:
        source = Path(directory)
        (source / "train.py").write_text("print('trains')\n")
        (source / "empty.py").touch()
        store = CodeStore(shm / "code")
        version = store.add(take([source]))
        archive = io.BytesIO()
        store.send(version, archive)
        yield Desk(PEER, shm, store), version, archive.getvalue()


@settings(deadline=None, max_examples=20)
@given(cuts=CUTS, piece=st.integers(1, 600))
def test_an_archive_arrives_whole_however_the_bytes_are_cut(cuts: list[int], piece: int) -> None:
    with peer() as (desk, version, archive), pytest.MonkeyPatch.context() as patch:
        patch.setattr(talk, "CODE_PIECE_BYTES", piece)
        got = io.BytesIO()
        wanted = GetCode(version=version)
        client, server = run(talk.fetch_code(caller(), wanted, got.write), Visit(desk), cuts)
        assert (client.error, server.error) == (None, None)
        assert got.getvalue() == archive
        assert client.result == len(archive)


@settings(deadline=None, max_examples=60)
@given(
    side=st.sampled_from([CLIENT, SERVER]),
    at=st.integers(0, 1200),
    flip=st.integers(0, 255),
    cuts=CUTS,
)
def test_what_is_changed_or_cut_off_fails_or_brings_the_very_bytes(
    side: str, at: int, flip: int, cuts: list[int]
) -> None:
    with peer() as (desk, version, archive):
        got = io.BytesIO()
        wanted = GetCode(version=version)
        damage = Damage(side, at, flip)
        client, _ = run(talk.fetch_code(caller(), wanted, got.write), Visit(desk), cuts, damage)
        assert client.error is None or isinstance(client.error, TransferFailed)
        assert client.error is not None or got.getvalue() == archive


def test_who_does_not_hold_a_version_says_so() -> None:
    with peer() as (desk, _, _):
        wanted = GetCode(version=VersionId("ab" * 32))
        client, _ = run(talk.fetch_code(caller(), wanted, lambda _: None), Visit(desk), [100])
        assert isinstance(client.error, Refused)
        assert "cannot give code version abababababab" in str(client.error)


def test_a_version_that_was_damaged_where_it_lies_is_not_finished() -> None:
    with peer() as (desk, version, _):
        [root] = desk.code.roots(version)
        script = root / "train.py"
        script.chmod(0o600)
        script.write_text("")
        wanted = GetCode(version=version)
        client, _ = run(talk.fetch_code(caller(), wanted, lambda _: None), Visit(desk), [100])
        assert isinstance(client.error, Refused)
        assert "was cut short" in str(client.error)
