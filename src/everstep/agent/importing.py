"""Imports what the main script of a code version imports, without running the script itself.

Runs in the process of a trial (trial.py), as ranks of that version would: same sys.path, same
directory, same environment but for the rank's own variables. First every new file is compiled. Then
the script's import statements run one by one, those in `try` and `if` too where their conditions
are plain, and what they rely on: changes of sys.path and of the environment. Nothing else does.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import pkgutil
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import everstep
from everstep.agent import placing, rank_main
from everstep.agent.fork import Trying, TryReply, TryRequest
from everstep.model import Value

DETAIL_CHARS = 16_384
ELSEWHERE_MAX = 100
_LINE_CHARS = 200
_RANK_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"}
    | {"ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "EVERSTEP_ATTACH"}
    | {"TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"}
)
_ABOUT_GPUS = re.compile(r"cuda|cudnn|cublas|nccl|nvml|nvidia|\bgpus?\b|\bhip\b", re.IGNORECASE)
Say = Callable[[Value], None]


class _Script(NamedTuple):
    """The main script, as Python found it."""

    path: str
    source: bytes
    namespace: dict[str, object]


class _NoScriptError(Exception):
    """There is nothing to import from; the message says why."""


def run(request: TryRequest, say: Say) -> TryReply:
    """What came of it. `say` takes what comes next, in case it never ends."""
    warnings.simplefilter("ignore", SyntaxWarning)
    report = _Report(request)
    say(Trying(what="its files are compiled"))
    for path in request.to_compile:
        failure = _attempt(lambda path=path: _compile(path))  # type: ignore[misc]
        if failure is not None:
            return report.of(failure, path)
    placing.forget_modules(request.places)
    sys.path[:] = placing.move_paths(sys.path, request.places)
    before = set(sys.modules)
    found: list[_Script] = []
    failure = _attempt(lambda: found.append(_find_script(request, say)))
    if failure is not None:
        return report.of(failure, request.command[0])
    imports = _Imports(found[0], say)
    failure = imports.run()
    if failure is None:
        return TryReply(elsewhere=_elsewhere(request, before))
    reply = report.of(failure, found[0].path, unsure=imports.unsure)
    return TryReply(
        problem=reply.problem,
        detail=reply.detail,
        untold=reply.untold,
        elsewhere=_elsewhere(request, before),
    )


def _attempt(work: Callable[[], object]) -> BaseException | None:
    """Run what is the user's: it may raise anything, SystemExit too."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 -- user code
        return error
    return None


def _compile(path: str) -> None:
    compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


# --- the script ----------------------------------------------------------------------------------


def _find_script(request: TryRequest, say: Say) -> _Script:
    """Put in front of sys.path what Python would, and read the script."""
    main = rank_main.new_main()
    if request.module:
        sys.argv = ["-m", *request.command[1:]]
        placing.put_in_front(placing.moved(os.getcwd(), request.places))
        return _find_module(request.command[0], main, say)
    path = placing.moved(rank_main.absolute(request.command[0]), request.places)
    sys.argv = [path, *request.command[1:]]
    importer = pkgutil.get_importer(path)
    if importer is not None:
        # A directory or zip file with a __main__.py.
        sys.path.insert(0, path)
        return _as_main(importer.find_spec("__main__"), f"there is no __main__ in {path}", main)
    placing.put_in_front(str(Path(os.path.realpath(path)).parent))
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise _NoScriptError(f"the script cannot be read: {error.strerror}") from error
    vars(main).update(__file__=path, __cached__=None)
    return _Script(path, source, vars(main))


def _find_module(name: str, main: ModuleType, say: Say) -> _Script:
    say(Trying(what=f"the packages around {name} are imported"))
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    return _as_main(spec, f"there is no module {name} that could be run", main)


def _as_main(spec: ModuleSpec | None, problem: str, main: ModuleType) -> _Script:
    """The module that runs as the script. One without source, as of a .pyc, is not looked into."""
    if spec is None or spec.origin is None or spec.loader is None:
        raise _NoScriptError(problem)
    vars(main).update(__file__=spec.origin, __spec__=spec, __package__=spec.parent)
    get_source: Callable[[str], str | None] = getattr(spec.loader, "get_source", lambda _: None)
    source = get_source(spec.name) or ""
    return _Script(spec.origin, source.encode(), vars(main))


# --- its imports ---------------------------------------------------------------------------------


class _Imports:
    """Runs the import statements of one script. A failure is returned, not raised: it is news."""

    def __init__(self, script: _Script, say: Say) -> None:
        self._path = script.path
        self._source = script.source
        self._names = script.namespace
        self._say = say
        self._assigned: dict[str, ast.stmt] = {}
        """Statements that were passed over, by the name that they give a value to."""
        self._left = 0
        """Places where the script seems to change sys.path, less those that were run."""

    @property
    def unsure(self) -> bool:
        """Whether modules may be missing only because the script itself was not run."""
        return self._left > 0

    def run(self) -> BaseException | None:
        tree: list[ast.Module] = []
        failure = _attempt(lambda: tree.append(ast.parse(self._source, self._path)))
        if failure is not None:
            return failure
        self._left = _mentions_of_path(tree[0])
        return self._all(tree[0].body)

    def _all(self, statements: Sequence[ast.stmt]) -> BaseException | None:
        for statement in statements:
            failure = self._one(statement)
            if failure is not None:
                return failure
        return None

    def _one(self, statement: ast.stmt) -> BaseException | None:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            return self._import(statement)
        if isinstance(statement, ast.Try):
            return self._try(statement)
        if isinstance(statement, ast.If):
            return self._if(statement)
        if isinstance(statement, ast.With):
            return self._with(statement)
        if _prepares(statement):
            self._prepare(statement)
        for name in _names_given(statement):
            self._assigned[name] = statement
        return None

    def _import(self, statement: ast.stmt) -> BaseException | None:
        text = ast.unparse(statement)[:_LINE_CHARS]
        self._say(Trying(what=f"line {statement.lineno}, {text}"))
        return self._execute(statement)

    def _execute(self, statement: ast.stmt) -> BaseException | None:
        module = ast.Module([statement], [])
        code = compile(module, self._path, "exec", dont_inherit=True)
        return _attempt(lambda: exec(code, self._names))  # noqa: S102 -- that is what a trial is

    def _evaluate(self, expression: ast.expr) -> object:
        """Its value if it is plain, else None: whatever it calls is not to be run here."""
        if not all(isinstance(node, _PLAIN) for node in ast.walk(expression)):
            return None
        code = compile(ast.Expression(expression), self._path, "eval", dont_inherit=True)
        found: list[object] = [None]
        _attempt(lambda: found.append(eval(code, self._names)))  # noqa: S307 -- names, constants
        return found[-1]

    def _try(self, statement: ast.Try) -> BaseException | None:
        failure = self._all(statement.body)
        if failure is None:
            failure = self._all(statement.orelse)
        else:
            failure = self._handled(statement.handlers, failure)
        return self._all(statement.finalbody) or failure

    def _handled(
        self, handlers: Sequence[ast.ExceptHandler], failure: BaseException
    ) -> BaseException | None:
        for handler in handlers:
            kinds = BaseException if handler.type is None else self._evaluate(handler.type)
            if not _is_one_of(failure, kinds):
                continue
            if any(_gives_up(each) for each in handler.body):
                return failure
            return self._all(handler.body)
        return failure

    def _if(self, statement: ast.If) -> BaseException | None:
        value = self._evaluate(statement.test)
        if value is None:
            return None  # nobody knows which way it goes
        return self._all(statement.body if value else statement.orelse)

    def _with(self, statement: ast.With) -> BaseException | None:
        failure = self._all(statement.body)
        calls = [item.context_expr for item in statement.items]
        suppresses = any("suppress" in ast.unparse(call) for call in calls)
        return None if suppresses else failure

    def _prepare(self, statement: ast.stmt) -> None:
        """Run it, after the plain assignments of names that it uses."""
        mentions = _mentions_of_path(statement)
        if self._may_run(statement, set()) and self._execute(statement) is None:
            self._left -= mentions

    def _may_run(self, statement: ast.stmt, seen: set[str]) -> bool:
        if not all(_is_harmless(call, self._assigned) for call in _calls(statement)):
            return False
        used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        for name in sorted(used - self._names.keys() - seen):
            given = self._assigned.get(name)
            if given is None:
                continue
            seen.add(name)
            if not self._may_run(given, seen) or self._execute(given) is not None:
                return False
        return True


_PLAIN = (
    *(ast.Name, ast.Constant, ast.Attribute, ast.Load, ast.Tuple, ast.Subscript, ast.Slice),
    *(ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop),
)
"""What an expression may be made of to be evaluated: nothing that calls."""
_PREPARE = ("sys.path.", "os.environ.", "site.addsitedir", "os.environ[", "sys.path[")
_HARMLESS = ("os.path.", "os.environ.", "os.getcwd", "os.getenv", "sys.path.", "site.addsitedir")
_READERS = frozenset({"print", "len", "list", "tuple", "set", "str", "repr", "sorted"})
_HARMLESS_NAMES = frozenset(
    {"Path", "pathlib", "str", "abspath", "dirname", "join", "realpath", "getenv", "getcwd"}
)


def _prepares(statement: ast.stmt) -> bool:
    """Whether imports below may rely on it."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return ast.unparse(statement.value.func).startswith(_PREPARE)
    if isinstance(statement, ast.Assign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        written = [ast.unparse(target) for target in targets]
        return any(text == "sys.path" or text.startswith(_PREPARE) for text in written)
    return False


def _names_given(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []


def _calls(statement: ast.stmt) -> list[ast.Call]:
    return [node for node in ast.walk(statement) if isinstance(node, ast.Call)]


def _is_harmless(call: ast.Call, assigned: dict[str, ast.stmt]) -> bool:
    """Whether it only computes a path, or is the change that is wanted."""
    if ast.unparse(call.func).startswith(_HARMLESS):
        return True
    root: ast.expr = call.func
    while isinstance(root, ast.Attribute | ast.Call | ast.Subscript | ast.BinOp):
        root = (
            root.func
            if isinstance(root, ast.Call)
            else root.left
            if isinstance(root, ast.BinOp)
            else root.value
        )
    return isinstance(root, ast.Name) and (root.id in _HARMLESS_NAMES or root.id in assigned)


def _mentions_of_path(tree: ast.AST) -> int:
    """Places that may change sys.path: not those that only read or print it."""
    read = {id(child) for node in ast.walk(tree) for child in _read_by(node)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    texts = [ast.unparse(node) for node in nodes if id(node) not in read]
    return sum(text in ("sys.path", "site.addsitedir") for text in texts)


def _read_by(node: ast.AST) -> Sequence[ast.AST]:
    """What this takes as it is and does not change."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return (node.value,)
    if isinstance(node, ast.Compare):
        return (node.left, *node.comparators)
    if isinstance(node, ast.For | ast.comprehension):
        return (node.iter,)
    if isinstance(node, ast.FormattedValue):
        return (node.value,)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in _READERS:
        return node.args
    return ()


def _is_one_of(failure: BaseException, kinds: object) -> bool:
    one_of = kinds if isinstance(kinds, tuple) else (kinds,)
    return any(isinstance(kind, type) and isinstance(failure, kind) for kind in one_of)


def _gives_up(statement: ast.stmt) -> bool:
    """Whether an `except` block ends the script after all."""
    if isinstance(statement, ast.Raise):
        return True
    calls = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return calls and ast.unparse(statement).startswith(("sys.exit(", "exit(", "quit(", "os._exit("))


# --- what came of it -----------------------------------------------------------------------------


class _Report:
    """From an exception to what people are told."""

    def __init__(self, request: TryRequest) -> None:
        self._request = request
        self._files = set(_as_found(request.roots, request.files))

    def of(self, error: BaseException, path: str, *, unsure: bool = False) -> TryReply:
        """`path`: of the file that was read. `unsure`: sys.path may be another one in ranks."""
        if isinstance(error, _NoScriptError):
            return TryReply(problem=str(error))
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        text = next(iter(said.splitlines()), "")[:_LINE_CHARS]
        problem = f"{type(error).__name__}: {text} ({self._where(error, path)})"
        untold = self._why_untold(error, unsure=unsure)
        detail = _detail(error)
        if untold:
            return TryReply(untold=f"{untold}: {problem}", detail=detail)
        return TryReply(problem=problem, detail=detail)

    def _why_untold(self, error: BaseException, *, unsure: bool) -> str:
        if isinstance(error, KeyError) and error.args and error.args[0] in _RANK_VARIABLES:
            return "it reads what only ranks have while it is imported"
        if isinstance(error, ModuleNotFoundError) and unsure:
            return "the script changes sys.path in its own way"
        module_missing = isinstance(error, ModuleNotFoundError | SyntaxError)
        if self._request.beside_ranks and not module_missing and _is_about_gpus(error):
            return "it was tried without a GPU, beside ranks"
        return ""

    def _where(self, error: BaseException, path: str) -> str:
        """The innermost place in the version's own code."""
        if isinstance(error, SyntaxError) and error.filename is not None:
            return f"{self._shown(error.filename)}, line {error.lineno}"
        frames = traceback.extract_tb(error.__traceback__)
        for frame in reversed(frames):
            if frame.filename in self._files:
                return f"{self._shown(frame.filename)}, line {frame.lineno}"
        return self._shown(path)

    def _shown(self, path: str) -> str:
        for root in self._request.roots:
            if path.startswith(f"{root}/"):
                return path[len(root) + 1 :]
        return path


def _detail(error: BaseException) -> str:
    """The traceback as a rank would show it: without our frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    return text[-DETAIL_CHARS:]


def _is_about_gpus(error: BaseException) -> bool:
    if _ABOUT_GPUS.search(f"{type(error).__name__}: {error}"):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "torch/cuda/" in frames[-1].filename


def _elsewhere(request: TryRequest, before: set[str]) -> tuple[str, ...]:
    """Files of modules that are not in the version, and that nothing installed."""
    files = set(_as_found(request.roots, request.files))
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    libraries.add(os.path.dirname(everstep.__file__))  # noqa: PTH120
    installed = tuple(f"{os.path.realpath(library)}/" for library in libraries)
    found = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name in before or not isinstance(file, str) or not file.startswith("/"):
            continue
        real = os.path.realpath(file)
        by_a_tool = "/site-packages/" in real or "/dist-packages/" in real
        ours = not files.isdisjoint((real, *map(str, Path(real).parents)))  # or in a zip of ours
        if not ours and not by_a_tool and not real.startswith(installed):
            found.add(file)
    return tuple(sorted(found)[:ELSEWHERE_MAX])


def _as_found(roots: Sequence[str], files: Sequence[str]) -> Iterator[str]:
    """These files, by the names of the roots and by where those really are."""
    yield from files
    for root in roots:
        real = os.path.realpath(root)
        if real != root:
            yield from (real + file[len(root) :] for file in files if file.startswith(f"{root}/"))
