"""A store has whole versions or none, whatever comes in, dies or runs full; on real directories."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import py_compile
import resource
import signal
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.code.archive import MAGIC
from everstep.code.manifest import CodeBroken, Manifest, encoded, short, version_of
from everstep.code.snapshot import CodeTooLarge, Limits, Snapshot, lies_there, take
from everstep.code.store import CodeStore
from everstep.model import VersionId
from tests.code.trees import TREE, as_nobody, contents, file, link, listing, plant

DEADLINE_S = 90.0
NO_SUCH = VersionId("0" * 64)


@pytest.fixture
def store(tmp_path: Path) -> CodeStore:
    return CodeStore(tmp_path / "job" / "code")


def added(store: CodeStore, where: Path, tree: Mapping[str, bytes | str] = TREE) -> VersionId:
    return store.add(take([plant(where, tree)]))


def archive(store: CodeStore, version: VersionId) -> bytes:
    sink = io.BytesIO()
    store.send(version, sink)
    return sink.getvalue()


def leftovers(store: CodeStore) -> list[str]:
    """What is in the store besides whole versions."""
    names = {path.name for path in store.root.iterdir()}
    return sorted(names - {".lock"} - set(store.versions()))


# --- adding --------------------------------------------------------------------------------------


def test_a_version_has_what_the_roots_had_read_only(tmp_path: Path, store: CodeStore) -> None:
    root = plant(tmp_path / "one", TREE)
    (root / "train.py").chmod(0o750)
    version = store.add(take([root, plant(tmp_path / "two", {"lib.py": b"1"})]))
    assert store.has(version)
    assert store.versions() == (version,)
    first, second = store.roots(version)
    assert contents(first) == contents(root)
    assert contents(second) == {"lib.py": b"1"}
    assert stat.S_IMODE((first / "train.py").stat().st_mode) == 0o555
    assert stat.S_IMODE((first / "net/layers.py").stat().st_mode) == 0o444
    times = {path.stat().st_mtime for path in first.rglob("*.py")}
    assert len(times) == 1
    assert lies_there(store.manifest(version), [first, second])
    store.verify(version)
    assert leftovers(store) == []


def test_python_keeps_compiled_files_in_a_version(tmp_path: Path, store: CodeStore) -> None:
    version = added(store, tmp_path / "one")
    (root,) = store.roots(version)
    argv = [sys.executable, "-c", "import net.layers; print(net.layers.width)"]
    environ = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(argv, env=environ, cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout == "8\n"
    assert list((root / "net" / "__pycache__").glob("layers.*.pyc"))
    store.verify(version)


def test_the_same_code_is_there_once(tmp_path: Path, store: CodeStore) -> None:
    assert added(store, tmp_path / "one") == added(store, tmp_path / "two")
    assert len(store.versions()) == 1


def test_an_empty_root_is_a_root(tmp_path: Path, store: CodeStore) -> None:
    (root,) = store.roots(added(store, tmp_path / "one", {}))
    assert list(root.iterdir()) == []


def test_a_file_that_changes_after_the_look_is_kept_as_it_was_copied(
    tmp_path: Path, store: CodeStore
) -> None:
    root = plant(tmp_path / "one", TREE)
    snapshot = take([root])
    (root / "train.py").write_bytes(b"import net, sys\n")
    version = store.add(snapshot)
    assert version != version_of(snapshot.manifest)
    assert version == version_of(take([root]).manifest)
    store.verify(version)


@pytest.mark.parametrize("path", ["train.py", "net"])
def test_what_vanishes_after_the_look_is_an_error_and_leaves_nothing(
    tmp_path: Path, store: CodeStore, path: str
) -> None:
    root = plant(tmp_path / "one", TREE)
    snapshot = take([root])
    (root / path).rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        store.add(snapshot)
    assert store.versions() == ()
    assert leftovers(store) == []


def test_a_file_that_grows_without_end_is_not_copied_without_end(
    tmp_path: Path, store: CodeStore
) -> None:
    root = plant(tmp_path / "one", TREE)
    snapshot = take([root])
    with (root / "train.py").open("wb") as big:
        big.truncate(10 << 30)
    with pytest.raises(CodeTooLarge, match=r"train\.py has 65 MiB"):
        store.add(snapshot)
    assert leftovers(store) == []


def test_copying_ends_in_time(tmp_path: Path, store: CodeStore) -> None:
    with pytest.raises(CodeTooLarge, match=r"could not be copied to .* within -1 s"):
        store.add(take([plant(tmp_path / "one", TREE)]), within_s=-1.0)
    assert leftovers(store) == []


def test_a_snapshot_that_leads_out_of_its_root_is_refused(store: CodeStore) -> None:
    bad = Manifest(roots=((file("../x"),),))
    with pytest.raises(CodeBroken, match="leads out of its root"):
        store.add(Snapshot(bad, ({"../x": io.BytesIO},)))


def adds(root: Path, source: Path, together: Barrier) -> None:
    snapshot = take([source])
    together.wait(DEADLINE_S)
    CodeStore(root).add(snapshot)


def test_several_processes_that_add_the_same_leave_one_whole_version(
    tmp_path: Path, store: CodeStore
) -> None:
    tree = {f"m{number}.py": b"x" * 5000 for number in range(300)}
    source = plant(tmp_path / "one", tree)
    context = multiprocessing.get_context("fork")
    argv = (store.root, source, context.Barrier(4))
    processes = [context.Process(target=adds, args=argv) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in processes] == [0] * 4
    (version,) = store.versions()
    store.verify(version)
    assert leftovers(store) == []


# --- from store to store -------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b.py", "ü", "a b"])
TREES = st.dictionaries(NAMES, st.binary(max_size=20) | st.sampled_from(["b.py", "/data"]))


@given(TREES, TREES)
@settings(max_examples=25)
def test_a_version_comes_back_from_its_archive(
    one: dict[str, bytes | str], two: dict[str, bytes | str]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        plant(here / "one" / "sub", one)
        sender, receiver = CodeStore(here / "sender"), CodeStore(here / "receiver")
        version = sender.add(take([here / "one", plant(here / "two", two)]))
        data = archive(sender, version)
        assert len(data) == sender.size_of_archive(version)
        source = Dribble(data + b"what follows is not ours")
        receiver.receive(version, source)
        assert source.at == len(data)
        receiver.verify(version)
        assert [contents(root) for root in receiver.roots(version)] == [
            contents(root) for root in sender.roots(version)
        ]
        assert archive(receiver, version) == data
        assert leftovers(receiver) == []


class Dribble:
    """A source that gives fewer bytes than it is asked for, as sockets do."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def read(self, count: int, /) -> bytes:
        found = self._data[self.at : self.at + min(count, 7)]
        self.at += len(found)
        return found


def test_nothing_is_read_of_what_is_there(tmp_path: Path, store: CodeStore) -> None:
    version = added(store, tmp_path / "one")
    source = Dribble(b"garbage")
    store.receive(version, source)
    assert source.at == 0


def framed(manifest: Manifest | bytes, content: bytes = b"") -> bytes:
    data = manifest if isinstance(manifest, bytes) else encoded(manifest)
    return MAGIC + struct.pack("<Q", len(data)) + data + content


def bad_id(manifest: Manifest) -> VersionId:
    """An id that fits: only then does anybody look at what is wrong with the rest."""
    return version_of(manifest)


ONE = listing(file("a.py", b"12345"))


@pytest.mark.parametrize(
    ("version", "data", "says"),
    [
        (bad_id(ONE), b"", "ended in its head"),
        (bad_id(ONE), b"GET / HTTP/1.1\r\n\r\n", "is no archive of everstep"),
        (bad_id(ONE), MAGIC + b"\xff" * 8, "has 18446744073709551615 bytes"),
        (bad_id(ONE), MAGIC + struct.pack("<Q", 5000) + b"{", "ended in its head"),
        (bad_id(ONE), framed(b"{garbage"), "is bad"),
        (bad_id(ONE), framed(listing(file("b.py", b"12345"))), "is that of"),
        (bad_id(ONE), framed(ONE), "ended 5 bytes before the end of a.py"),
        (bad_id(ONE), framed(ONE, b"123"), "ended 2 bytes before the end of a.py"),
        (bad_id(ONE), framed(ONE, b"12346"), "a.py of code version .* was damaged on its way"),
        (VersionId("../../etc"), framed(ONE), "is no id of a code version"),
        (VersionId(""), framed(ONE), "is no id of a code version"),
    ],
)
def test_an_archive_that_is_not_the_version_leaves_nothing(
    store: CodeStore, version: VersionId, data: bytes, says: str
) -> None:
    with pytest.raises(CodeBroken, match=says):
        store.receive(version, io.BytesIO(data))
    assert store.versions() == ()
    if store.root.exists():
        assert leftovers(store) == []


@pytest.mark.parametrize(
    "manifest",
    [
        listing(file("../a")),
        listing(file("/tmp/everstep-was-here")),
        listing(link("a", "/tmp"), file("a/b")),
        listing(file("a"), file("a/b")),
        Manifest(roots=((file("a"), file("a")),)),
        listing(link("a", "../../b")),
    ],
)
def test_an_archive_that_would_write_elsewhere_is_refused_though_its_id_fits(
    store: CodeStore, manifest: Manifest
) -> None:
    with pytest.raises(CodeBroken, match="is bad"):
        store.receive(bad_id(manifest), io.BytesIO(framed(manifest)))
    assert not store.root.exists()


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (Limits(files=1), "it has 2 files, 1 at most"),
        (Limits(file_bytes=4), "b has 5 bytes, 4 at most"),
        (Limits(total_bytes=8), "it has 9 bytes, 8 at most"),
    ],
)
def test_an_archive_that_is_too_large_is_refused_before_it_is_read(
    tmp_path: Path, limits: Limits, says: str
) -> None:
    manifest = listing(file("a", b"1234"), file("b", b"12345"))
    source = Dribble(framed(manifest, b"123412345"))
    with pytest.raises(CodeBroken, match=f"too large: .*{says}"):
        CodeStore(tmp_path / "code", limits).receive(version_of(manifest), source)
    assert source.at == len(framed(manifest))
    assert not (tmp_path / "code").exists()


@given(st.data())
@settings(max_examples=25)
def test_an_archive_with_any_flipped_byte_gives_nothing(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        sender, receiver = CodeStore(Path(name, "sender")), CodeStore(Path(name, "receiver"))
        version = added(sender, Path(name, "one"))
        sent = bytearray(archive(sender, version))
        sent[data.draw(st.integers(0, len(sent) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        with pytest.raises(CodeBroken):
            receiver.receive(version, io.BytesIO(sent))
        assert receiver.versions() == ()


@contextmanager
def full(directory: Path) -> Iterator[None]:
    """Nothing more fits there: a tmpfs of 64 KiB if we may mount one, else a limit of this process.

    Both are refused by the kernel in the middle of a write.
    """
    directory.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "everstep-test", str(directory)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode != 0:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)
        return
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def test_a_disk_that_is_full_is_an_error_and_leaves_nothing(
    tmp_path: Path, store: CodeStore
) -> None:
    version = added(store, tmp_path / "one", {"a.py": b"1", "b.py": b"x" * 500_000})
    data = archive(store, version)
    with full(tmp_path / "disk"):
        receiver = CodeStore(tmp_path / "disk" / "code")
        with pytest.raises(OSError, match=r"No space left|File too large"):
            receiver.receive(version, io.BytesIO(data))
        assert leftovers(receiver) == []
        with pytest.raises(OSError, match=r"No space left|File too large"):
            receiver.add(store.snapshot(version))
        assert leftovers(receiver) == []
        assert receiver.versions() == ()


def test_a_store_that_may_not_be_written_is_an_error() -> None:
    with tempfile.TemporaryDirectory() as name:
        source = plant(Path(name) / "one", TREE)
        Path(name).chmod(0o555)
        with as_nobody(), pytest.raises(PermissionError):
            CodeStore(Path(name) / "code").add(take([source]))
        Path(name).chmod(0o755)


# --- what is wrong with what is there ------------------------------------------------------------


def damaged(path: Path, change: Callable[[Path], object]) -> None:
    path.chmod(0o644)
    change(path)
    path.chmod(0o444)


def test_a_damaged_version_is_found_and_can_be_fetched_again(
    tmp_path: Path, store: CodeStore
) -> None:
    version = added(store, tmp_path / "one")
    good = archive(store, version)
    (root,) = store.roots(version)
    damaged(root / "net/layers.py", lambda path: path.write_bytes(b"width = 9\n"))
    with pytest.raises(CodeBroken, match=r"is damaged: net/layers.py has another content\."):
        store.verify(version)
    store.discard(version)
    assert store.versions() == ()
    store.receive(version, io.BytesIO(good))
    store.verify(version)


def test_a_version_without_its_manifest_is_none_and_is_replaced(
    tmp_path: Path, store: CodeStore
) -> None:
    """As a power failure may leave it."""
    version = added(store, tmp_path / "one")
    good = archive(store, version)
    for fetch in (
        lambda: store.receive(version, io.BytesIO(good)),
        lambda: added(store, tmp_path / "two"),
    ):
        (store.root / version / "manifest.json").unlink()
        assert store.versions() == ()
        fetch()
        store.verify(version)
        assert leftovers(store) == []


def test_code_that_somebody_put_into_a_version_is_found(tmp_path: Path, store: CodeStore) -> None:
    version = added(store, tmp_path / "one")
    (root,) = store.roots(version)
    plant(root, {"numpy.py": b""})
    with pytest.raises(CodeBroken, match=r"numpy\.py is not in it"):
        store.verify(version)


def test_a_file_that_was_cut_short_is_not_sent_as_whole(tmp_path: Path, store: CodeStore) -> None:
    version = added(store, tmp_path / "one")
    (root,) = store.roots(version)
    damaged(root / "train.py", lambda path: path.write_bytes(b""))
    with pytest.raises(CodeBroken, match=r"train\.py of code version .* was cut short"):
        archive(store, version)


def test_a_manifest_that_is_garbage_is_one_sentence(tmp_path: Path, store: CodeStore) -> None:
    version = added(store, tmp_path / "one")
    (store.root / version / "manifest.json").write_bytes(b"\0" * 50)
    with pytest.raises(CodeBroken, match=f"The manifest of code version {short(version)} is bad"):
        store.manifest(version)


@pytest.mark.parametrize("version", [NO_SUCH, VersionId(""), VersionId(".."), VersionId("a/b")])
def test_what_is_not_there_is_one_sentence(store: CodeStore, version: VersionId) -> None:
    assert not store.has(version)
    asked: list[Callable[[VersionId], object]] = [
        store.manifest,
        store.roots,
        store.snapshot,
        store.verify,
        store.size_of_archive,
        lambda version: archive(store, version),
    ]
    for ask in asked:
        with pytest.raises(CodeBroken, match="There is no code version"):
            ask(version)
    store.discard(version)
    store.keep([])
    assert store.versions() == ()


# --- merging -------------------------------------------------------------------------------------


def test_a_merged_version_takes_its_files_from_those_it_comes_from(
    tmp_path: Path, store: CodeStore
) -> None:
    one = added(store, tmp_path / "one", {"a.py": b"1", "b.py": b"2", "l": "a.py"})
    two = added(store, tmp_path / "two", {"c.py": b"3"})
    merged = listing(file("b.py", b"3"), file("x/a.py", b"1", executable=True), link("l", "/x"))
    version = store.add_manifest(merged, [one, two])
    assert version == version_of(merged)
    assert contents(store.roots(version)[0]) == {"b.py": b"3", "x/a.py": b"1", "l": "/x"}
    store.verify(version)


def test_a_merge_of_what_nobody_has_or_that_is_too_large_is_refused(
    tmp_path: Path, store: CodeStore
) -> None:
    one = added(store, tmp_path / "one", {"a.py": b"1"})
    with pytest.raises(CodeBroken, match=r"None of the versions to merge has the content of b\.py"):
        store.add_manifest(listing(file("b.py", b"9")), [one])
    small = CodeStore(store.root, Limits(files=1))
    with pytest.raises(CodeTooLarge, match=r"merged code is too large .*: it has 2 files, 1 at"):
        small.add_manifest(listing(file("a.py", b"1"), file("b.py", b"1")), [one])
    with pytest.raises(CodeBroken, match="leads out of its root"):
        store.add_manifest(listing(file("../a", b"1")), [one])
    assert store.versions() == (one,)


def test_a_merge_from_a_damaged_version_gives_none(tmp_path: Path, store: CodeStore) -> None:
    one = added(store, tmp_path / "one", {"a.py": b"1"})
    damaged(store.roots(one)[0] / "a.py", lambda path: path.write_bytes(b"2"))
    with pytest.raises(CodeBroken, match="that a merge takes files from is damaged"):
        store.add_manifest(listing(file("b.py", b"1")), [one])
    assert store.versions() == (one,)


# --- keeping -------------------------------------------------------------------------------------


def test_only_what_is_wanted_is_kept(tmp_path: Path, store: CodeStore) -> None:
    one = added(store, tmp_path / "one")
    added(store, tmp_path / "two", {"b.py": b""})
    store.keep([one, NO_SUCH])
    assert store.versions() == (one,)
    store.verify(one)
    assert leftovers(store) == []


class Held:
    """A source that has given one part of an archive, and looks at the store before the next."""

    def __init__(self, data: bytes, look: Callable[[], None]) -> None:
        self._data = io.BytesIO(data)
        self._look = look
        self.looks = 0

    def read(self, count: int, /) -> bytes:
        if self._data.tell() > 100:
            self.looks += 1
            self._look()
        return self._data.read(count)


def test_nothing_is_removed_while_something_is_written(tmp_path: Path, store: CodeStore) -> None:
    sender = CodeStore(tmp_path / "sender")
    version = added(sender, tmp_path / "one")
    other = added(store, tmp_path / "two", {"b.py": b""})
    source = Held(archive(sender, version), lambda: store.keep([]))
    store.receive(version, source)
    assert source.looks
    assert store.versions() == tuple(sorted([version, other]))
    store.verify(version)
    store.keep([version])
    assert store.versions() == (version,)


def test_what_a_killed_writer_left_is_removed(tmp_path: Path, store: CodeStore) -> None:
    version = added(store, tmp_path / "one")
    snapshot = take([plant(tmp_path / "two", {"a.py": b"1", "b.py": b"2"})])

    def die() -> io.BytesIO:
        os.kill(os.getpid(), signal.SIGKILL)
        return io.BytesIO()

    dying = snapshot._replace(places=({**snapshot.places[0], "b.py": die},))
    process = multiprocessing.get_context("fork").Process(target=store.add, args=(dying,))
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == -signal.SIGKILL
    assert len(leftovers(store)) == 1
    store.keep([version])
    assert leftovers(store) == []
    assert store.versions() == (version,)


def test_a_half_removed_version_is_none(tmp_path: Path, store: CodeStore) -> None:
    """As a removal that was killed leaves it."""
    version = added(store, tmp_path / "one")
    gone = store.root / ".gone-x"
    gone.mkdir()
    (store.root / version).rename(gone / version)
    assert store.versions() == ()
    store.keep([version])
    assert leftovers(store) == []


def test_digests_are_of_content_alone(tmp_path: Path, store: CodeStore) -> None:
    (entry,) = store.manifest(added(store, tmp_path / "one", {"a.py": b"abc"})).roots[0]
    assert entry.digest == hashlib.sha256(b"abc").hexdigest()


def test_compiled_files_of_one_store_are_good_in_another(tmp_path: Path, store: CodeStore) -> None:
    """Python compares the time of change and the size."""
    version = added(store, tmp_path / "one")
    other = CodeStore(tmp_path / "other")
    other.receive(version, io.BytesIO(archive(store, version)))
    compiled = [
        Path(py_compile.compile(str(one.roots(version)[0] / "train.py"), doraise=True) or "")
        for one in (store, other)
    ]
    heads = [path.read_bytes()[:16] for path in compiled]
    assert heads[0] == heads[1]
