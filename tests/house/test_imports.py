"""What may be imported where: beyond the layers, which `make check` reads from pyproject.toml."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import everstep

SOURCE = Path(everstep.__file__).parent
HAS_TORCH = {
    "everstep.agent.launcher",
    "everstep.agent.rank_main",
    "everstep.checkpoint.capture",
    "everstep.checkpoint.copier",
    "everstep.checkpoint.cuda",
    "everstep.checkpoint.digest",
    "everstep.checkpoint.export",
    "everstep.checkpoint.guard",
    "everstep.checkpoint.layout",
    "everstep.checkpoint.load",
    "everstep.checkpoint.merging",
    "everstep.checkpoint.naming",
    "everstep.checkpoint.replicas",
    "everstep.checkpoint.rng",
    "everstep.checkpoint.start",
    "everstep.checkpoint.threads",
    "everstep.trainer.memory",
    "everstep.trainer.restore",
}
"""Modules that import torch when they are imported. They live in ranks, from the first checkpoint
on, or fork ranks. attach() needs none of them."""
HAS_EXTRA = {"everstep.checkpoint.remote"}
"""Modules that need an extra of the package; whoever imports them says which it is."""
BASE_ONLY = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in ("everstep", "msgspec"):
            return None
        raise ModuleNotFoundError(f"not in the base installation: {name}", name=name)

sys.meta_path.insert(0, Refuse())
import everstep
for name in sys.argv[1:]:
    __import__(name)
print(everstep.attach().__class__.__name__)
"""
NO_TORCH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, f"{name} imports torch"
"""


def modules(below: str = "everstep") -> list[str]:
    """Names of all modules of the package below a package, without running any."""
    found = pkgutil.walk_packages([str(SOURCE)], "everstep.", onerror=lambda _: None)
    names = [module.name for module in found if module.name.startswith(below)]
    return [name for name in names if not name.endswith("__main__")]


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", code, *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


def test_a_training_script_needs_msgspec_and_nothing_else() -> None:
    names = modules("everstep.trainer") + modules("everstep.checkpoint")
    names = [name for name in names if name not in HAS_TORCH | HAS_EXTRA]
    done = python(BASE_ONLY, *names)
    assert done.returncode == 0, done.stderr


def test_only_ranks_and_the_launcher_that_forks_them_import_torch() -> None:
    done = python(NO_TORCH, *(name for name in modules() if name not in HAS_TORCH))
    assert done.returncode == 0, done.stderr


def test_the_keeper_is_small_and_needs_the_standard_library_alone() -> None:
    text = (SOURCE / "keeper.py").read_text()
    assert len(text.splitlines()) < 200
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        assert all(name.partition(".")[0] in sys.stdlib_module_names for name in names), names


def test_the_command_without_its_extra_says_what_to_install() -> None:
    code = BASE_ONLY.rpartition("print")[0] + "from everstep.__main__ import main\nmain()\n"
    done = python(code)
    assert done.returncode == 1
    assert "pip install 'everstep[controller]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_public_names_are_those_that_are_promised() -> None:
    assert sorted(everstep.__all__) == PUBLIC
    assert all(getattr(everstep, name) for name in PUBLIC)
    listed = {name for name in vars(everstep) if not name.startswith("_")}
    borrowed = {"annotations", "Any", "TYPE_CHECKING", *submodules()}
    assert listed - borrowed <= set(PUBLIC)


def submodules() -> set[str]:
    return {name.split(".")[1] for name in modules()}


PUBLIC = ["__version__", "attach"]
