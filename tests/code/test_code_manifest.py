"""A manifest has one id, is refused if it leads out of its root, and two merge file by file."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.code.manifest import (
    CodeBroken,
    Entry,
    Manifest,
    changed,
    decoded,
    encoded,
    is_version,
    parents,
    problem_of,
    short,
    version_of,
)
from everstep.code.merge import Conflicts, merge
from everstep.code.requirements import requirement_files
from everstep.model import VersionId
from tests.code.trees import file, link, listing

NAMES = st.sampled_from(["a", "b", "c.py", "ü", "a b", "x\ny"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
CONTENTS = st.sampled_from([b"", b"1", b"2", b"3"])


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Sound ones: no path goes through a file."""
    entries: dict[str, Entry] = {}
    for path in sorted(draw(st.sets(PATHS, max_size=8))):
        if entries.keys().isdisjoint(parents(path)):
            if draw(st.integers(0, 4)) == 0:
                entries[path] = link(path, draw(st.sampled_from(["/data", "b"])))
            else:
                entries[path] = file(path, draw(CONTENTS), executable=draw(st.booleans()))
    return listing(*entries.values())


@given(manifests())
def test_a_manifest_comes_back_from_its_bytes_with_the_same_id(manifest: Manifest) -> None:
    assert problem_of(manifest) is None
    assert decoded(encoded(manifest), version_of(manifest)) == manifest
    assert is_version(version_of(manifest))


@given(manifests(), manifests())
def test_ids_differ_exactly_where_contents_do(one: Manifest, other: Manifest) -> None:
    assert (version_of(one) == version_of(other)) == (one == other)
    assert bool(changed(one, other)) == (one != other)


def test_the_id_is_that_of_former_releases() -> None:
    """Versions in journals and stores are named by it."""
    manifest = listing(file("train.py", b"import net\n"), link("data", "/data"))
    assert version_of(manifest) == (
        "9b604937c702ad5e59e01b640acbc5c831c5fe7f1a5297922c1cea50194bee31"
    )


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([file("../out.py")], "leads out of its root"),
        ([file("/etc/passwd")], "leads out of its root"),
        ([file("a/../../b")], "leads out of its root"),
        ([file("a//b")], "not in its shortest form"),
        ([file("./a")], "not in its shortest form"),
        ([file("")], "leads out of its root"),
        ([file("a\0b")], "is no path"),
        ([file("a" * 5000)], "is no path"),
        ([file("a"), file("a")], "one is there twice"),
        ([file("b"), file("a")], "are not sorted"),
        ([file("a"), file("a/b")], "lies below a file or a link"),
        ([link("a", "/etc"), file("a/passwd")], "lies below a file or a link"),
        ([link("a", "../../etc")], "relative link out of its root"),
        ([link("a/b", "../../etc")], "relative link out of its root"),
        ([link("a", "b\0")], "a link to no path"),
        ([Entry(path="a")], "has no digest"),
        ([Entry(path="a", digest="x" * 64)], "has no digest"),
        ([msgspec.structs.replace(file("a"), size=-1)], "has no digest, or no size"),
        ([msgspec.structs.replace(file("a"), target="/b")], "both a file and a link"),
    ],
)
def test_what_would_be_written_elsewhere_or_twice_is_refused(
    entries: list[Entry], problem: str
) -> None:
    manifest = Manifest(roots=(tuple(entries),))
    assert problem in (problem_of(manifest) or "")
    with pytest.raises(CodeBroken, match=r"The manifest of code version \(none\) is bad"):
        decoded(encoded(manifest))


def test_a_link_may_lead_up_within_its_root_and_anywhere_by_an_absolute_path() -> None:
    assert problem_of(listing(link("a/b/c", "../../d"), link("data", "/data"))) is None


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b'{"roots": [[["a"]]]}', b"null"])
def test_bytes_that_are_no_manifest_are_one_sentence(data: bytes) -> None:
    with pytest.raises(CodeBroken, match="is bad"):
        decoded(data)


def test_a_manifest_under_another_id_is_refused() -> None:
    wanted = version_of(listing(file("a")))
    with pytest.raises(CodeBroken, match=f"of code version {short(wanted)} is that of"):
        decoded(encoded(listing(file("b"))), VersionId(wanted))


def test_changes_name_added_removed_and_changed_files_of_every_root() -> None:
    old = Manifest(roots=((file("a"), file("b"), file("c")), (file("lib.py", b"1"),)))
    new = Manifest(
        roots=((file("a"), file("b", executable=True), file("d")), (file("lib.py", b"2"),))
    )
    assert changed(old, new) == ("b", "c", "d", "root-1/lib.py")


# --- merging -------------------------------------------------------------------------------------


@given(manifests(), manifests())
def test_a_merge_with_no_change_is_the_other_side(base: Manifest, side: Manifest) -> None:
    assert merge(base, base, side) == side
    assert merge(base, side, base) == side
    assert merge(base, side, side) == side


@given(manifests(), manifests(), manifests())
def test_a_merge_is_symmetric_sound_and_of_what_the_sides_have(
    base: Manifest, ours: Manifest, theirs: Manifest
) -> None:
    merged = merge(base, ours, theirs)
    assert merge(base, theirs, ours) == merged
    by_both = set(changed(base, ours)) & set(changed(base, theirs))
    if isinstance(merged, Conflicts):
        assert merged.paths
        return
    assert problem_of(merged) is None
    assert set(changed(base, merged)) == set(changed(base, ours)) | set(changed(base, theirs))
    for path in by_both:
        assert path not in changed(ours, theirs)


def test_both_sides_add_to_what_there_was() -> None:
    base = listing(file("a", b"1"), file("b", b"1"), file("gone"))
    ours = listing(file("a", b"2"), file("b", b"1"), file("gone"), file("new"))
    theirs = listing(file("a", b"1"), file("b", b"3"))
    assert merge(base, ours, theirs) == listing(file("a", b"2"), file("b", b"3"), file("new"))


@pytest.mark.parametrize(
    ("ours", "theirs", "conflicts"),
    [
        ([file("a", b"2")], [file("a", b"3")], ("a",)),
        ([], [file("a", b"3")], ("a",)),
        ([file("a", b"1"), file("n", b"2")], [file("a", b"1"), file("n", b"3")], ("n",)),
        ([file("a", b"1", executable=True)], [file("a", b"2")], ("a",)),
        ([file("a", b"1"), file("d")], [file("a", b"1"), file("d/e")], ("d/e",)),
    ],
)
def test_what_both_changed_differently_is_named(
    ours: list[Entry], theirs: list[Entry], conflicts: tuple[str, ...]
) -> None:
    base = listing(file("a", b"1"))
    assert merge(base, listing(*ours), listing(*theirs)) == Conflicts(conflicts)


def test_further_roots_are_merged_too() -> None:
    base = Manifest(roots=((file("a"),), (file("lib"),)))
    ours = Manifest(roots=((file("a", b"2"),), (file("lib"),)))
    theirs = Manifest(roots=((file("a"),), (file("lib", b"2"),)))
    assert merge(base, ours, theirs) == Manifest(roots=(ours.roots[0], theirs.roots[1]))
    theirs = Manifest(roots=((file("a"),), (file("lib", b"3"),)))
    ours = Manifest(roots=((file("a"),), (file("lib", b"2"),)))
    assert merge(base, ours, theirs) == Conflicts(("root-1/lib",))


def test_files_that_say_what_has_to_be_installed_are_known() -> None:
    told = [
        "requirements.txt",
        "docker/requirements-dev.txt",
        "requirements/gpu.txt",
        "root-1/pyproject.toml",
        "setup.py",
        "setup.cfg",
        "environment.yml",
        "environment-gpu.yaml",
        "uv.lock",
        "poetry.lock",
        "Pipfile",
        "Pipfile.lock",
        "Dockerfile",
        "docker/Dockerfile.gpu",
    ]
    others = ["train.py", "requirements.py", "notes/my_setup.py", "configs/env.yaml"]
    assert requirement_files(sorted([*told, *others])) == tuple(sorted(told))
