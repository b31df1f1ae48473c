"""Looks at stacks, made by hand: what ranks show, in the words of the places they are in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from everstep.core.aggregate import Taken
from everstep.core.groups import Layout, layout_of
from everstep.diagnosis.fingerprints import fingerprint_of
from everstep.diagnosis.frames import Frame, Thread
from everstep.looks import (
    Child,
    Cluster,
    Fingerprint,
    Posture,
    Role,
    Shown,
    Stack,
    Stood,
    ranges_of,
)
from everstep.model import LayoutSpec, Rank

C10D = "torch/distributed/distributed_c10d.py"
QUEUES = "multiprocessing/queues.py"
WORKER = "torch/utils/data/_utils/worker.py"
LOADER = "torch/utils/data/dataloader.py"
BELOW = (("train", "train.py", 40), ("<module>", "train.py", 90))
"""What led there."""
PLACES: Mapping[str, tuple[tuple[str, str, int], ...]] = {
    "reduce_scatter": (
        ("_reduce_scatter_base", C10D, 4201),
        ("start_grad_sync", "megatron/core/distributed/param_and_grad_buffer.py", 200),
        ("sync_gradients", "train.py", 71),
    ),
    "all_gather": (
        ("all_gather_into_tensor", C10D, 3888),
        ("gather_logits", "train.py", 55),
    ),
    "all_reduce": (("all_reduce", C10D, 2810), ("average", "train.py", 61)),
    "other_all_reduce": (("all_reduce", C10D, 2810), ("clip", "train.py", 66)),
    "barrier": (("barrier", C10D, 4811), ("meet", "train.py", 80)),
    "irecv": (("irecv", C10D, 2301), ("recv_forward", "pipeline.py", 20)),
    "isend": (("isend", C10D, 2201), ("send_forward", "pipeline.py", 30)),
    "eval_first": (("isend", C10D, 2201), ("evaluate_first", "mmlu.py", 20)),
    "eval_middle": (("irecv", C10D, 2301), ("evaluate_middle", "mmlu.py", 30)),
    "eval_last": (("broadcast", C10D, 2701), ("evaluate_last", "mmlu.py", 40)),
    "eval_stuck": (("send", C10D, 2250), ("pass_on", "mmlu.py", 50)),
    "evaluating": (("score_batch", "mmlu.py", 70), ("evaluate", "mmlu.py", 10)),
    "backward": (("_engine_run_backward", "torch/autograd/graph.py", 829),),
    "compute": (("attention", "model.py", 12),),
    "lock": (("acquire", "filelock/_api.py", 10), ("cache_of", "train.py", 33)),
    "native_lock": (
        ("PyThread_acquire_lock_timed", "libpython3.11.so.1.0", 0),
        ("lock_PyThread_acquire_lock", "libpython3.11.so.1.0", 0),
        ("cache_of", "train.py", 33),
    ),
    "native_recv": (
        ("pthread_cond_timedwait", "libc.so.6", 0),
        ("gloo::transport::tcp::UnboundBuffer::waitRecv", "libtorch_cpu.so", 0),
        ("c10d::ProcessGroupGloo::RecvWork::wait", "libtorch_cpu.so", 0),
        ("receive", "pipeline.py", 21),
    ),
    "native_work": (
        ("pthread_cond_wait", "libc.so.6", 0),
        ("c10d::Work::wait", "libtorch_cpu.so", 0),
        ("average", "train.py", 62),
    ),
    "spins": (
        ("cuStreamSynchronize", "libcuda.so.1", 0),
        ("cudaStreamSynchronize", "libcudart.so.12", 0),
        ("at::native::_local_scalar_dense_cuda", "libtorch_cuda.so", 0),
        ("item", "torch/_tensor.py", 0),
        ("log_loss", "train.py", 50),
    ),
    "spins_on": (
        ("clock_gettime", "[vdso]", 0),
        *(("??", "libcuda.so.1", 0) for _ in range(7)),
        ("cuStreamSynchronize", "libcuda.so.1", 0),
        ("cudaStreamSynchronize", "libcudart.so.12", 0),
        ("at::native::_local_scalar_dense_cuda", "libtorch_cuda.so", 0),
        ("item", "torch/_tensor.py", 0),
        ("log_loss", "train.py", 50),
    ),
    "user_code": (("cache_of", "train.py", 33),),
    "reading": (("read_config", "train.py", 31),),
    "loader": (
        ("get", QUEUES, 114),
        ("_get_data", LOADER, 1310),
        ("__next__", LOADER, 733),
    ),
    "saving": (("fsync", "os.py", 12), ("save_checkpoint", "train.py", 22)),
    "exit": (("_exit_function", "multiprocessing/util.py", 360),),
    "worker_idle": (
        ("select", "selectors.py", 415),
        ("wait", "multiprocessing/connection.py", 947),
        ("_poll", "multiprocessing/connection.py", 440),
        ("poll", "multiprocessing/connection.py", 257),
        ("get", QUEUES, 113),
        ("_worker_loop", WORKER, 334),
    ),
    "worker_busy": (("__getitem__", "dataset.py", 9), ("_worker_loop", WORKER, 334)),
}


def threads(place: str) -> tuple[Thread, ...]:
    """A process whose main thread is in this place."""
    frames = (*PLACES[place], *BELOW)
    return (
        Thread(
            main=True, frames=tuple(Frame(name=n, file=file, line=at) for n, file, at in frames)
        ),
    )


PRINTS = {place: Fingerprint(fingerprint_of(threads(place))) for place in PLACES}
STACKS = {
    fingerprint: Stack(fingerprint=fingerprint, threads=threads(place))
    for place, fingerprint in PRINTS.items()
}


def shown(place: str, state: str = "S", wchan: str = "") -> Shown:
    """A process that is in this place; an empty one: its stack could not be taken."""
    if not place:
        return Shown(state=state, wchan=wchan, why_none="py-spy may not look into it")
    return Shown(stack=PRINTS[place], state=state, wchan=wchan)


def posture(place: str, state: str = "S", wchan: str = "", *children: Child) -> Posture:
    """A rank with its children."""
    return Posture(rank=shown(place, state, wchan), children=children)


def worker(place: str, state: str = "S", wchan: str = "", role: Role = Role.LOADER) -> Child:
    """A child of a rank."""
    return Child(role=role, shown=shown(place, state, wchan))


def layout(ranks_per_machine: int = 1, order: str = "tp cp dp pp", **sizes: int) -> Layout:
    """As --layout states it."""
    spec = LayoutSpec(order=tuple(order.split()), **sizes)
    return layout_of(spec, ranks_per_machine)


def taken(showing: Mapping[int, str | Posture], **more: Any) -> Taken:
    """A look in which each of these ranks shows what it says; silent ranks are left out."""
    ranks: dict[Posture, list[int]] = {}
    for rank, what in showing.items():
        ranks.setdefault(posture(what) if isinstance(what, str) else what, []).append(rank)
    clusters = tuple(Cluster(posture=p, ranks=ranges_of(r)) for p, r in ranks.items())
    more.setdefault("world_size", len(showing))
    return Taken(clusters=clusters, stacks=STACKS, **more)


def stood(
    ranks: Iterable[int], enqueued: int, completed: int, group: str = "dp", **more: Any
) -> Stood:
    """Ranks that are so far in a group."""
    return Stood(
        group=group,
        enqueued=enqueued,
        completed=completed,
        ranks=ranges_of(map(Rank, ranks)),
        **more,
    )
