"""The house rules that a program can check, with their numbers (CONTRIBUTING.md has the others)."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUNCTION_LINES_MAX = 60
FUNCTION_LINES_MEDIAN = 12
FILE_LINES_MAX = 600
FILE_LINES_MEDIAN = 180
LINE_CHARS_MAX = 100
PARAMETERS_MAX = 6
BROAD_EXCEPTS = {
    "agent/checks/judging.py": 1,
    "agent/importing.py": 1,
    "checkpoint/copier.py": 1,
    "trainer/feature.py": 1,
}
"""File below src/everstep -> handlers of Exception or wider. Only a shell's outermost loop, a
library inside someone else's training process, or what calls checks that anybody may add, may have
one; each says why in a comment."""
SKIPS = {"tests/checkpoint/test_slots.py": 1}
"""File -> tests that may be skipped. Only for want of a right that a user need not have; the reason
is printed, and says what is tested instead."""
_SKIP = re.compile(r"mark\.(?:skip|xfail)|pytest\.(?:skip|xfail|importorskip)")
BANNED_NAMES = re.compile(r"manager|helper|utils?$|common|misc", re.IGNORECASE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tracked() -> list[Path]:
    """Every file that is part of the repository, committed or about to be."""
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in names.splitlines() if (path := ROOT / name).is_file()]


def python_files(*tops: str) -> list[Path]:
    return [
        path
        for path in tracked()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in tops
    ]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


EVERYTHING = ("src", "tests", "bench", "examples", "scripts")


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(tree(path)):
        if isinstance(node, Function):
            yield node


def length(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_no_function_is_longer_than_a_screen() -> None:
    long = [
        f"{name_of(path)}:{function.lineno} {function.name} has {length(function)} lines"
        for path in python_files(*EVERYTHING)
        for function in functions(path)
        if length(function) > FUNCTION_LINES_MAX
    ]
    assert not long


def test_the_usual_function_is_short() -> None:
    lengths = [length(function) for path in python_files("src") for function in functions(path)]
    assert statistics.median(lengths) < FUNCTION_LINES_MEDIAN


def test_no_file_is_a_giant() -> None:
    sizes = {
        name_of(path): len(path.read_text().splitlines()) for path in python_files(*EVERYTHING)
    }
    assert not {name: lines for name, lines in sizes.items() if lines > FILE_LINES_MAX}
    source = [lines for name, lines in sizes.items() if name.startswith("src/")]
    assert statistics.median(source) < FILE_LINES_MEDIAN


def test_no_line_is_wider_than_100_columns() -> None:
    wide = [
        f"{name_of(path)}:{number}"
        for path in python_files(*EVERYTHING)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > LINE_CHARS_MAX
    ]
    assert not wide


def test_no_function_takes_more_than_six_parameters() -> None:
    many = [
        f"{name_of(path)}:{function.lineno} {function.name}"
        for path in python_files(*EVERYTHING)
        for function in functions(path)
        if parameters(function) > PARAMETERS_MAX
    ]
    assert not many


def parameters(function: Function) -> int:
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in named)


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        name_of(path)
        for path in python_files(*EVERYTHING)
        if not ast.get_docstring(tree(path)) and path.read_text().strip()
    ]
    assert not silent


def test_every_public_class_says_what_it_is() -> None:
    silent = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in python_files("src")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not silent


def test_broad_excepts_are_counted() -> None:
    found: dict[str, int] = {}
    for path in python_files("src"):
        count = sum(broad(node) for node in ast.walk(tree(path)))
        if count:
            found[str(path.relative_to(ROOT / "src" / "everstep"))] = count
    assert found == BROAD_EXCEPTS


def broad(node: ast.AST) -> bool:
    """Whether this swallows everything. A handler that ends with `raise` does not."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
        return any(ast.unparse(kind) in ("Exception", "BaseException") for kind in node.args)
    if not isinstance(node, ast.ExceptHandler) or isinstance(node.body[-1], ast.Raise):
        return False
    kind = "BaseException" if node.type is None else ast.unparse(node.type)
    return kind in ("Exception", "BaseException")


def test_names_say_what_things_are() -> None:
    vague = [name_of(path) for path in python_files(*EVERYTHING) if BANNED_NAMES.search(path.stem)]
    vague += [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in python_files("src")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef | Function) and BANNED_NAMES.search(node.name)
    ]
    assert not vague


def test_skips_are_counted() -> None:
    found: dict[str, int] = {}
    for path in python_files("tests"):
        count = len(_SKIP.findall(path.read_text())) if path != Path(__file__) else 0
        if count:
            found[name_of(path)] = count
    assert found == SKIPS


def test_the_repository_names_no_place_of_its_makers() -> None:
    place = re.compile("/(" + "work|tmp/w" + r")/\w")
    named = [
        name_of(path)
        for path in tracked()
        if path.suffix in {".py", ".md", ".toml", ".txt", ".json", ""}
        and place.search(path.read_text(errors="replace"))
    ]
    assert not named


def test_the_changelog_has_the_version_of_the_package() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert f'__version__ = "{version[1]}"' in (ROOT / "src/everstep/__init__.py").read_text()
    assert f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text()
