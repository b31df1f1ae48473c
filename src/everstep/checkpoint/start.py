"""Starting from a directory of torch.distributed.checkpoint (DCP): another job's export, or any.

restore() calls it through the trainer when everstep has nothing newer. The directory may come from
another world size or layout: each rank reads what its own tensors need (resharding is DCP's work),
and nothing here communicates. What belonged to one rank alone (data position, random numbers) goes
back to it only if the number of ranks is the same.

Keys are those of export.py: the entry's name, then the path; optimizer state under the names of the
parameters, as torch.distributed.checkpoint.state_dict.get_state_dict() makes it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from everstep.checkpoint.capture import Stateful
from everstep.checkpoint.load import DoesNotFit, keep_dtypes
from everstep.checkpoint.merging import Path, leaves
from everstep.checkpoint.naming import Names, canonical, kind_of, parameters_of
from everstep.checkpoint.rng import RNG_ENTRY, set_rng_states
from everstep.checkpoint.tier import FILE, is_url
from everstep.model import NO_STEP, Rank, Step, Value

STEP_KEY = "everstep.step"
_SHOWN = 3
_Keys = dict[tuple[str, str], str]


class Started(Value, frozen=True, kw_only=True):
    """What start_from() did."""

    step: Step
    """The step that the directory holds, NO_STEP if it does not say."""
    left_out: tuple[str, ...]
    """Sentences about what keeps its fresh state."""
    set_rng: Callable[[], None]


def start_from(
    directory: str, state: Mapping[str, Stateful], rank: Rank, world_size: int
) -> Started:
    """Load the state from a DCP directory, a path or a URL for fsspec.

    Raises DoesNotFit; some may be loaded by then.
    """
    source = _Source(directory, rank, world_size)
    names = Names(state)
    found = 0
    for name, holder in state.items():
        try:
            if isinstance(holder, torch.nn.Module):
                found += _load_module(source, name, holder)
            elif isinstance(holder, torch.optim.Optimizer) and names.of(name):
                found += _load_optimizer(source, name, holder, names.of(name))
            else:
                live = dict(leaves(holder.state_dict()))
                found += _load_other(source, name, live, holder.load_state_dict)
        except (CheckpointException, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise DoesNotFit(f"{directory} does not fit {name!r}: {error}") from error
    if not found:
        raise DoesNotFit(
            f"{directory} has nothing of {', '.join(map(repr, state))}; its keys begin with "
            f"{', '.join(sorted({repr(key.split('.')[0]) for key in source.keys}))}: name the "
            "entries of checkpoint() so"
        )
    rng: list[Any] = []
    _load_other(source, RNG_ENTRY, {}, rng.append)
    step = source.values([STEP_KEY])[STEP_KEY] if STEP_KEY in source.keys else NO_STEP
    return Started(
        step=Step(step),
        left_out=tuple(source.left_out),
        set_rng=partial(set_rng_states, rng[0]) if rng else _nothing,
    )


def _nothing() -> None:
    pass


def _reader(directory: str) -> FileSystemReader:
    if not is_url(directory):
        return FileSystemReader(directory.removeprefix(FILE))
    from torch.distributed.checkpoint._fsspec_filesystem import (  # noqa: PLC0415 -- needs fsspec
        FsspecReader,
    )

    return FsspecReader(directory)


class _Source:
    """A DCP directory: its keys, and reading some of them."""

    def __init__(self, directory: str, rank: Rank, world_size: int) -> None:
        try:
            self._reader = _reader(directory)
            metadata = self._reader.read_metadata()
        except ImportError as error:
            raise DoesNotFit(
                f"{directory} is a URL and needs fsspec and the store's own package: install "
                f"everstep[remote] ({error})"
            ) from error
        except Exception as error:  # stores' packages raise whatever they like
            raise DoesNotFit(
                f"{directory} is no directory of torch.distributed.checkpoint: {error}"
            ) from error
        self.keys: dict[str, Any] = metadata.state_dict_metadata
        paths: dict[str, Path] = metadata.planner_data or {}
        self._paths = {key: tuple(paths.get(key, key.split("."))) for key in self.keys}
        self.rank = rank
        self.world_size = world_size
        self.left_out: list[str] = []

    def below(self, name: str, *path: str | int) -> dict[Path, str]:
        """The keys below a path, and what follows it in each."""
        before = (name, *path)
        return {
            whole[len(before) :]: key
            for key, whole in self._paths.items()
            if whole[: len(before)] == before and len(whole) > len(before)
        }

    def load_into(self, targets: dict[str, Any]) -> None:
        """Fill tensors in place and replace other values. Reads nothing but what they need."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*single process.*")
            load(targets, storage_reader=self._reader, planner=planner, no_dist=True)

    def target(self, key: str, like: Any) -> Any:
        """What to load this key into: a tensor as `like`, on its device and mesh, if that fits."""
        stored = self.keys[key]
        if not isinstance(stored, TensorStorageMetadata):
            return None
        if isinstance(like, torch.Tensor) and like.shape == stored.size:
            return torch.empty_like(like.detach(), dtype=stored.properties.dtype)
        return torch.empty(stored.size, dtype=stored.properties.dtype)

    def values(self, keys: Iterable[str]) -> dict[str, Any]:
        """Plain values, and whole tensors on the CPU."""
        targets = {key: self.target(key, None) for key in keys}
        self.load_into(targets)
        return targets


def _load_module(source: _Source, name: str, module: torch.nn.Module) -> bool:
    """Parameters and buffers are read in place; load_state_dict() then sees extra state, too."""
    if not source.below(name):
        source.left_out.append(f"{name!r} is not in it")
        return False
    live = module.state_dict()
    kind = kind_of(module)
    keys = {f"{name}.{canonical(key, kind)}": key for key in live}
    _need(f"{name}.", [key for key in keys if key not in source.keys])
    targets = {key: live[own] for key, own in keys.items()}
    source.load_into(targets)
    module.load_state_dict({own: targets[key] for key, own in keys.items()})
    return True


def _load_optimizer(
    source: _Source, name: str, optimizer: torch.optim.Optimizer, names: tuple[str, ...]
) -> bool:
    if not source.below(name):
        source.left_out.append(f"{name!r} is not in it")
        return False
    stored, groups = _optimizer_keys(source, name)
    targets, state = _optimizer_targets(source, stored, names, parameters_of(optimizer))
    if not targets and (stored or not groups):
        raise DoesNotFit(
            f"it has state for {_some(sorted({name for name, _ in stored})) or 'nothing'}, but the "
            f"script's parameters are {_some(names)}"
        )
    source.load_into(targets)
    loaded = {
        "state": {
            number: {what: targets[key] for what, key in keys.items()}
            for number, keys in state.items()
        },
        "param_groups": _groups(source, groups, optimizer, names),
    }
    optimizer.load_state_dict(loaded)
    keep_dtypes(optimizer, loaded)
    return True


def _optimizer_keys(source: _Source, name: str) -> tuple[_Keys, _Keys]:
    """State by parameter and what it is, and hyperparameters by group (or parameter) and name.

    get_state_dict() nests them, or with flatten_optimizer_state_dict makes one word of each path.
    """
    found: dict[str, _Keys] = {"state": {}, "param_groups": {}}
    for path, key in source.below(name).items():
        words = list(map(str, path))
        if len(words) == 1 and words[0].count(".") > 1:
            kind, _, rest = words[0].partition(".")
            words = [kind, *rest.rsplit(".", 1)]
        if len(words) == 3 and words[0] in found:
            found[words[0]][words[1], words[2]] = key
    return found["state"], found["param_groups"]


def _optimizer_targets(
    source: _Source,
    stored: _Keys,
    names: tuple[str, ...],
    parameters: list[torch.Tensor],
) -> tuple[dict[str, Any], dict[int, dict[str, str]]]:
    """Something to load into for each key of each parameter, and the keys by its number."""
    numbers = {name or str(number): number for number, name in enumerate(names)}
    targets: dict[str, Any] = {}
    state: dict[int, dict[str, str]] = {}
    for (name, what), key in stored.items():
        number = numbers.get(name)
        if number is not None:
            targets[key] = source.target(key, parameters[number])
            state.setdefault(number, {})[what] = key
    return targets, state


def _groups(
    source: _Source, stored: _Keys, optimizer: torch.optim.Optimizer, names: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The live groups with the stored learning rates and so on."""
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    owners = {group for group, _ in stored}
    nested = all(owner.isdigit() for owner in owners)
    if nested and owners and len(owners) != len(groups):
        raise ValueError(f"it has {len(owners)} parameter groups, the script has {len(groups)}")
    values = source.values(key for (_, what), key in stored.items() if what != "params")
    for number, group in enumerate(groups):
        owner = str(number) if nested else names[group["params"][0]]
        mine = {what: key for (which, what), key in stored.items() if which == owner}
        group |= {what: values[key] for what, key in mine.items() if key in values}
    return groups


def _load_other(
    source: _Source, name: str, live: Mapping[Path, Any], give: Callable[[Any], Any]
) -> bool:
    own = source.below(name, f"rank-{source.rank}")
    saved = {path[0] for path in source.below(name) if str(path[0]).startswith("rank-")}
    if saved and len(saved) != source.world_size:
        source.left_out.append(
            f"{name!r} is kept per rank, and it was saved on {len(saved)} ranks, not "
            f"{source.world_size}"
        )
        return False
    shared = {path: key for path, key in source.below(name).items() if path[0] not in saved}
    whole = [key for key in (name, f"{name}.rank-{source.rank}") if key in source.keys]
    found: dict[Path, str] = {(): whole[0]} if whole else shared | own
    if not found:
        source.left_out.append(f"{name!r} is not in it")
        return False
    targets = {key: source.target(key, live.get(path)) for path, key in found.items()}
    source.load_into(targets)
    give(_nested({path: targets[key] for path, key in found.items()}))
    return True


def _nested(values: Mapping[Path, Any]) -> Any:
    """Dictionaries and lists again. A path of numbers is a list."""
    if () in values:
        return values[()]
    groups: dict[str | int, dict[Path, Any]] = {}
    for (first, *rest), value in values.items():
        groups.setdefault(first, {})[tuple(rest)] = value
    if all(isinstance(key, int) for key in groups):
        return [_nested(groups[key]) for key in sorted(groups)]
    return {key: _nested(group) for key, group in groups.items()}


def _need(prefix: str, missing: list[str]) -> None:
    if missing:
        raise KeyError(f"it lacks {_some([key.removeprefix(prefix) for key in missing])}")


def _some(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return ", ".join(known[:_SHOWN]) + more
