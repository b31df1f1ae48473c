"""What a snapshot takes, what it leaves out or links, and what it refuses; on real directories."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.code.manifest import problem_of, version_of
from everstep.code.snapshot import (
    CodeTooLarge,
    Limits,
    difference,
    joined,
    lies_there,
    take,
)
from everstep.model import UserError
from tests.code.trees import TREE, as_nobody, paths, plant, targets


def test_equal_content_has_one_id_wherever_it_lies(tmp_path: Path) -> None:
    one = take([plant(tmp_path / "one", TREE)])
    other = take([plant(tmp_path / "deep" / "other", TREE)])
    assert version_of(one.manifest) == version_of(other.manifest)
    assert paths(one.manifest) == sorted(TREE)
    with one.places[0]["net/layers.py"]() as content:
        assert content.read() == b"width = 8\n"
    assert one.remarks == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "train.py").write_bytes(b"import nut\n"),
        lambda root: (root / "train.py").chmod(0o755),
        lambda root: (root / "train.py").rename(root / "main.py"),
        lambda root: (root / "configs/small.yaml").unlink(),
        lambda root: (root / "new.txt").touch(),
    ],
)
def test_every_change_gives_another_id(tmp_path: Path, change: Callable[[Path], object]) -> None:
    root = plant(tmp_path / "one", TREE)
    before = take([root])
    change(root)
    assert version_of(take([root]).manifest) != version_of(before.manifest)


def test_what_tools_make_is_left_out_in_silence(tmp_path: Path) -> None:
    made_by_tools: dict[str, bytes | str] = {
        ".git/HEAD": b"",
        "__pycache__/train.cpython-311.pyc": b"",
        "net/__pycache__/x.pyc": b"",
        "net/old.pyc": b"",
        ".venv/bin/python": b"",
        "venv/x": b"",
        "env311/pyvenv.cfg": b"",
        "env311/lib/x.py": b"",
        "node_modules/x.js": b"",
        ".mypy_cache/x": b"",
        ".ipynb_checkpoints/x": b"",
        ".train.py.swp": b"",
        ".#train.py": "anna@host.1234",
    }
    snapshot = take([plant(tmp_path / "one", {**TREE, **made_by_tools})])
    assert paths(snapshot.manifest) == sorted(TREE)
    assert snapshot.remarks == ()


def test_directories_of_the_job_are_left_out_or_linked(tmp_path: Path) -> None:
    root = plant(tmp_path / "one", {**TREE, "jobs/j/spec.json": b"", "out/step-1/x": b"1"})
    snapshot = take([root], without=[root / "jobs"], linked=[root / "out"])
    assert paths(snapshot.manifest) == sorted([*TREE, "out"])
    assert targets(snapshot.manifest)["out"] == str(root / "out")


def test_what_everstepignore_names_is_linked_to_where_it_lies(tmp_path: Path) -> None:
    ignore = b"# data\ndata/\n*.bin\n/models/*.pt\n\nnet/fast\n"
    tree = {
        ".everstepignore": ignore,
        "data/a/b.txt": b"1",
        "net/data/c.txt": b"2",
        "net/x.bin": b"3",
        "models/a.pt": b"4",
        "net/models/a.pt": b"5",
        "net/fast/k.py": b"6",
        "fast/k.py": b"7",
        "notdata": b"8",
    }
    root = plant(tmp_path / "one", tree)
    found = take([root]).manifest
    linked = ["data", "models/a.pt", "net/data", "net/fast", "net/x.bin"]
    assert targets(found) == {path: str(root / path) for path in linked}
    rest = [".everstepignore", "fast/k.py", "net/models/a.pt", "notdata"]
    assert paths(found) == sorted([*linked, *rest])


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"!keep.bin\n", r"line 1: '!keep.bin' would take"), (b"\xff\xfe", "cannot be read")],
)
def test_an_everstepignore_that_is_not_understood_is_refused(
    tmp_path: Path, content: bytes, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        take([plant(tmp_path / "one", {".everstepignore": content})])


def test_links_stay_within_the_root_or_lead_to_where_they_led(tmp_path: Path) -> None:
    plant(tmp_path / "shared", {"words.txt": b"w"})
    tree: dict[str, bytes | str] = {
        "a/b/c.py": b"",
        "inside": "a/b/c.py",
        "a/up": "../a/b",
        "itself": ".",
        "loop": "loop",
        "ping": "pong",
        "pong": "ping",
        "out": "../shared/words.txt",
        "absolute": "/etc/hostname",
        "in_full": f"{tmp_path}/one/a/b/c.py",
        "a/in_full": f"{tmp_path}/one/inside",
        "a/root_in_full": f"{tmp_path}/one",
        "through_in_full": f"{tmp_path}/one/out_dir/words.txt",
        "cache_in_full": f"{tmp_path}/one/__pycache__/x",
        "through": "out_dir/words.txt",
        "out_dir": "../shared",
        "a/b/root": "../..",
        "a/b/sly": "root/../shared",
        "cache": "__pycache__/x",
        "dangling": "nowhere/x",
    }
    root = plant(tmp_path / "one", tree)
    manifest = take([root]).manifest
    assert problem_of(manifest) is None
    assert targets(manifest) == {
        "inside": "a/b/c.py",
        "a/up": "../a/b",
        "itself": ".",
        "loop": "loop",
        "ping": "pong",
        "pong": "ping",
        "out": f"{root}/../shared/words.txt",
        "absolute": "/etc/hostname",
        "in_full": "a/b/c.py",
        "a/in_full": "../inside",
        "a/root_in_full": "..",
        "through_in_full": f"{root}/out_dir/words.txt",
        "cache_in_full": f"{root}/__pycache__/x",
        "through": f"{root}/out_dir/words.txt",
        "out_dir": f"{root}/../shared",
        "a/b/root": "../..",
        "a/b/sly": f"{root}/a/b/root/../shared",
        "cache": f"{root}/__pycache__/x",
        "dangling": f"{root}/nowhere/x",
    }
    assert lies_there(manifest, [root])


def test_a_root_may_be_a_link(tmp_path: Path) -> None:
    real = plant(tmp_path / "real", TREE)
    (tmp_path / "link").symlink_to("real")
    found = take([tmp_path / "link"], without=[real / "net"])
    assert paths(found.manifest) == sorted(path for path in TREE if not path.startswith("net/"))


def test_special_files_are_left_out_with_a_remark(tmp_path: Path) -> None:
    root = plant(tmp_path / "one", TREE)
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "net" / "sock"))
        snapshot = take([root])
    assert paths(snapshot.manifest) == sorted(TREE)
    (remark,) = snapshot.remarks
    assert "Left out" in remark
    assert f"{root}/pipe" in remark
    assert f"{root}/net/sock" in remark


def test_what_cannot_be_read_is_linked_with_a_remark() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = plant(Path(name) / "one", {**TREE, "secret": b"s", "locked/x": b"x"})
        Path(name).chmod(0o755)
        (root / "secret").chmod(0)
        (root / "locked").chmod(0)
        with as_nobody():
            snapshot = take([root])
        (root / "locked").chmod(0o755)
    for path in ("secret", "locked"):
        assert targets(snapshot.manifest)[path] == f"{root}/{path}"
        assert f"{root}/{path}" in snapshot.remarks[0]
    assert set(TREE) < set(paths(snapshot.manifest))


def test_a_sparse_file_of_ten_gigabytes_is_refused_by_name_and_not_read(tmp_path: Path) -> None:
    root = plant(tmp_path / "one", TREE)
    with (root / "data.bin").open("wb") as big:
        big.truncate(10 << 30)
    says = f"{root}/data.bin has 10.0 GiB, .* at most 64 MiB: .*{root}/.everstepignore"
    with pytest.raises(CodeTooLarge, match=says):
        take([root])
    (root / ".everstepignore").write_text("data.bin\n")
    assert targets(take([root]).manifest)["data.bin"] == f"{root}/data.bin"


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (Limits(files=4), "has more than 4 files"),
        (Limits(total_bytes=20), "has more than 1.91e-05 MiB in it"),
        (Limits(file_bytes=10), "train.py has .* at most"),
        (Limits(within_s=-1.0), "could not be read within"),
    ],
)
def test_a_root_with_too_much_in_it_is_refused_with_advice(
    tmp_path: Path, limits: Limits, says: str
) -> None:
    root = plant(tmp_path / "one", TREE)
    with pytest.raises(CodeTooLarge, match=f"(?s){says}.*{re.escape(str(root))}/.everstepignore"):
        take([root], limits)


def test_limits_are_for_all_roots_together(tmp_path: Path) -> None:
    roots = [plant(tmp_path / name, TREE) for name in ("one", "two")]
    assert take(roots, Limits(files=10)).manifest.files == 10
    with pytest.raises(CodeTooLarge, match="two has more than 9 files"):
        take(roots, Limits(files=9))


def test_several_roots_are_numbered_in_their_order(tmp_path: Path) -> None:
    roots = [plant(tmp_path / name, {name: b""}) for name in ("one", "two")]
    snapshot = take(roots)
    assert [[entry.path for entry in root] for root in snapshot.manifest.roots] == [
        ["one"],
        ["two"],
    ]
    parts = joined([take(roots[:1]), take(roots[1:])])
    assert parts.manifest == snapshot.manifest
    assert [list(places) for places in parts.places] == [["one"], ["two"]]


@pytest.mark.parametrize("tree", [{}, {"one": b"x"}])
def test_no_directory_is_one_sentence(tmp_path: Path, tree: dict[str, bytes]) -> None:
    plant(tmp_path, tree)
    says = "one is not a directory" if tree else "one does not exist"
    with pytest.raises(UserError, match=says):
        take([tmp_path / "one"])


def test_a_name_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    root = plant(tmp_path / "one", TREE)
    (root / os.fsdecode(b"caf\xe9.py")).touch()
    with pytest.raises(UserError, match=r"caf\\xe9.py.* is not UTF-8: rename it"):
        take([root])


def test_a_link_to_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    root = plant(tmp_path / "one", TREE)
    plant(root, {"x": os.fsdecode(b"caf\xe9")})
    with pytest.raises(UserError, match="is not UTF-8"):
        take([root])


# --- whether it lies there -----------------------------------------------------------------------


def test_what_programs_write_beside_their_code_is_no_change_of_it(tmp_path: Path) -> None:
    root = plant(tmp_path / "one", {**TREE, ".everstepignore": b"data\n", "data/x": b"1"})
    manifest = take([root]).manifest
    written = {
        "train.log": b"",
        "runs/1/code/train.py": b"a copy",
        "net/__pycache__/layers.cpython-311.pyc": b"",
        "data/x.py": b"",
        "checkpoints/step-1": b"",
    }
    plant(root, written)
    assert difference(manifest, [root], 60.0) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda root: (root / "train.py").write_bytes(b"import nut\n"), "train.py has another con"),
        (lambda root: (root / "train.py").write_bytes(b""), "train.py has another size"),
        (lambda root: (root / "train.py").chmod(0o755), "train.py has other rights"),
        (lambda root: (root / "train.py").unlink(), r"train.py cannot be read \(No such file"),
        (lambda root: (root / "latest.yaml").unlink(), "latest.yaml cannot be read"),
        (lambda root: plant(root, {"yaml.py": b""}), "yaml.py is not in it"),
        (lambda root: plant(root, {"net/fast.so": b""}), "net/fast.so is not in it"),
        (lambda root: plant(root, {"yaml/__init__.py": b""}), "yaml is not in it"),
        (lambda root: plant(root, {"net/k.py": "../train.py"}), "net/k.py is not in it"),
        (lambda root: root.rename(root.with_name("two")), "cannot be read"),
    ],
)
def test_a_change_of_what_would_run_is_seen(
    tmp_path: Path, change: Callable[[Path], object], says: str
) -> None:
    root = plant(tmp_path / "one", TREE)
    manifest = take([root]).manifest
    assert lies_there(manifest, [root])
    change(root)
    assert re.search(says, difference(manifest, [root], 60.0) or "nothing")
    assert not lies_there(manifest, [root])


def test_a_link_that_leads_elsewhere_is_seen(tmp_path: Path) -> None:
    root = plant(tmp_path / "one", {**TREE, "configs/big.yaml": b"lr: 2\n"})
    manifest = take([root]).manifest
    (root / "latest.yaml").unlink()
    plant(root, {"latest.yaml": "configs/big.yaml"})
    assert difference(manifest, [root], 60.0) == "latest.yaml leads elsewhere"


def test_a_fifo_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    root = plant(tmp_path / "one", TREE)
    manifest = take([root]).manifest
    (root / "net/__init__.py").unlink()
    os.mkfifo(root / "net/__init__.py")
    assert not lies_there(manifest, [root])


def test_looking_ends_in_time(tmp_path: Path) -> None:
    root = plant(tmp_path / "one", TREE)
    assert difference(take([root]).manifest, [root], -1.0) == "it could not be read within -1 s"


def test_another_number_of_roots_is_another_code(tmp_path: Path) -> None:
    root = plant(tmp_path / "one", TREE)
    assert not lies_there(take([root]).manifest, [root, root])
