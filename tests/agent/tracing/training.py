"""A training job of two ranks with one loader worker each, for the tests of looks at stacks.

Each rank does what the file do-RANK in its directory says, once, in its next step.
"""

TRAIN = """
    import ctypes, os, time
    from pathlib import Path

    import torch
    import torch.distributed as dist

    import everstep

    RANK = int(os.environ["RANK"])


    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield torch.ones(2)


    def read_an_answer():
        with open("answers", "rb") as answers:
            answers.read(1)


    def hold_the_interpreter():
        answers = os.open("answers", os.O_RDWR)
        ctypes.PyDLL(None).read(answers, ctypes.create_string_buffer(1), 1)  # keeps the lock


    def do_what_is_asked():
        asked = Path(f"do-{RANK}")
        if asked.exists():
            name = asked.read_text()
            asked.unlink()
            Path(f"doing-{RANK}").write_text(name)
            globals()[name]()


    dist.init_process_group("gloo")
    run = everstep.attach()
    loader = torch.utils.data.DataLoader(Numbers(), num_workers=1, batch_size=1)
    data = None
    for step in run.steps():
        if data is None:
            data = iter(loader)  # forks a worker while all that attach() began runs
        total = next(data)
        do_what_is_asked()
        dist.all_reduce(total)
        time.sleep(0.005)
"""

PARTED = """
    import os, signal, sys

    import torch
    import torch.distributed as dist

    import everstep

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    steps = iter(everstep.attach().steps())
    dist.all_reduce(torch.ones(next(steps) + 2))
    dist.destroy_process_group()  # whose threads a forked child would wait for
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    next(steps)
    signal.pause()
"""
"""Each rank has a forked child that ends as programs do, and takes apart all that it inherited."""
