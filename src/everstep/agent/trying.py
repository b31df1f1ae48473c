"""Has a code version tried before ranks run it: from the order to what the launcher is asked.

Used by effects.py for TryVersion. What is tried, and how, is in trial.py and importing.py.
"""

from __future__ import annotations

from everstep.actions import TryVersion
from everstep.agent.code import Code, Lies, NotHeld
from everstep.agent.fork import TryReply, TryRequest
from everstep.agent.launching import Launching, NotForked
from everstep.agent.this_machine import ThisMachine
from everstep.code.manifest import Manifest
from everstep.events import VersionTried


async def try_version(
    here: ThisMachine, order: TryVersion, code: Code, launching: Launching
) -> VersionTried:
    """What came of it; "untold" whenever that says nothing of the version."""
    try:
        lies = await code.find(order.version)
        reply = await launching.attempt(_request(here, order, lies, await code.first()))
    except (NotHeld, NotForked) as error:
        reply = TryReply(untold=str(error))
    return VersionTried(
        machine=here.setup.machine,
        action=order.id,
        version=order.version,
        problem=reply.problem,
        detail=reply.detail,
        untold=reply.untold,
        elsewhere=reply.elsewhere,
        took_s=reply.took_s,
    )


def _request(
    here: ThisMachine, order: TryVersion, lies: Lies, first: Manifest | None
) -> TryRequest:
    spec = here.spec
    files = [
        f"{root}/{entry.path}"
        for root, entries in zip(lies.roots, lies.manifest.roots, strict=False)
        for entry in entries
        if not entry.target
    ]
    return TryRequest(
        version=order.version,
        command=spec.command,
        module=spec.module,
        working_dir=spec.working_dir,
        roots=lies.roots,
        places=lies.places,
        files=tuple(files),
        to_compile=tuple(_to_compile(lies, first)),
        within_s=order.within_s,
        beside_ranks=order.beside_ranks,
    )


def _to_compile(lies: Lies, first: Manifest | None) -> list[str]:
    """All Python files that are not as the job was submitted with them.

    What never compiled and is not imported (a template, code for Python 2) says nothing against a
    new version.
    """
    before = () if first is None or first == lies.manifest else first.roots
    known = {(root, e.path, e.digest) for root, entries in enumerate(before) for e in entries}
    return [
        f"{lies.roots[root]}/{entry.path}"
        for root, entries in enumerate(lies.manifest.roots[: len(lies.roots)])
        for entry in entries
        if entry.path.endswith(".py")
        and not entry.target
        and (root, entry.path, entry.digest) not in known
    ]
