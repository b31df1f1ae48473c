"""Flags and facts of a host become a plan: the table of what `everstep run` means."""

from __future__ import annotations

import re
from typing import Any

import pytest

from everstep.agent.checks import registry
from everstep.commands.flags import parse
from everstep.commands.plan import (
    Address,
    HostFacts,
    Leads,
    Plan,
    Shown,
    endpoint_of,
    plan,
)
from everstep.model import ChecksSpec, ElasticSpec, Every, UserError
from tests.agent.checks.parts import WordsCheck

FACTS: dict[str, Any] = {
    "state_dir": "/state",
    "working_dir": "/home/u",
    "cpus": 6,
    "gpus": 0,
    "uid": "0123abcd",
}


def made(words: str, **facts: Any) -> Plan:
    return plan(parse(words.split()), HostFacts(**(FACTS | facts)))


def test_stand_ins_are_one_job_of_this_host() -> None:
    made_plan = made("--local-machines 4 --nproc-per-node 2 --standbys 1 train.py --lr 1")
    spec = made_plan.spec
    assert (spec.nnodes, spec.nproc_per_node, spec.standbys, spec.local) == (4, 2, 1, True)
    assert spec.command == ("train.py", "--lr", "1")
    assert spec.job == "train-0123"
    assert spec.checkpoint.directory == "/state/train-0123/checkpoints"
    assert (made_plan.leads, made_plan.joins) == (Leads.MUST, False)
    assert made_plan.address == Address(host="127.0.0.1", port=0)


@pytest.mark.parametrize(("words", "given", "auto"), [("", 0, False), ("auto", 0, True)])
def test_the_number_of_standbys_may_be_left_to_the_history_of_the_job(
    words: str, given: int, auto: bool
) -> None:
    asked = f"--standbys {words} " if words else ""
    spec = made(f"--local-machines 4 {asked}train.py").spec
    assert (spec.standbys, spec.auto_standbys) == (given, auto)


@pytest.mark.parametrize(
    "words",
    [
        "train.py",
        "--standalone train.py",
        "--standalone --nnodes 1:1 --rdzv-endpoint other:5 train.py",
        "--nnodes 1 --rdzv-backend c10d --rdzv-endpoint localhost:0 train.py",
    ],
)
def test_one_machine_needs_no_rendezvous(words: str) -> None:
    made_plan = made(words)
    assert made_plan.spec.local
    assert made_plan.spec.nnodes == 1
    assert not made_plan.joins
    assert made_plan.address.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("words", "host", "port"),
    [
        ("--nnodes 2 t.py", "127.0.0.1", 29500),
        ("--nnodes 2 --master-addr node0 t.py", "node0", 29500),
        ("--nnodes 2 --master-addr [fe80::1] --master-port 7 t.py", "fe80::1", 7),
        ("--nnodes 2 --rdzv-endpoint node0:1234 t.py", "node0", 1234),
        ("--nnodes 2 --rdzv-endpoint [fe80::1]:1234 t.py", "fe80::1", 1234),
        ("--nnodes 2 --rdzv-endpoint node0 t.py", "node0", 29500),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0 t.py", "node0", 29400),
        ("--nnodes 2 --rdzv-backend c10d t.py", "localhost", 29400),
    ],
)
def test_the_endpoint_is_where_torchrun_would_put_it(words: str, host: str, port: int) -> None:
    assert endpoint_of(parse(words.split())) == Address(host=host, port=port)
    assert made(words).joins


@pytest.mark.parametrize(
    ("words", "here", "leads"),
    [
        ("--node-rank 0", False, Leads.MUST),
        ("--node-rank 1", True, Leads.NO),
        ("", True, Leads.MAY),
        ("", False, Leads.NO),
        ("--rdzv-backend c10d --node-rank 1", True, Leads.MAY),
        ("--rdzv-conf is_host=1", False, Leads.MUST),
        ("--rdzv-conf is_host=false", True, Leads.NO),
    ],
)
def test_the_host_of_the_endpoint_starts_the_controller(
    words: str, here: bool, leads: Leads
) -> None:
    made_plan = made(f"--nnodes 2 --rdzv-endpoint n:1 {words} t.py", endpoint_here=here)
    assert made_plan.leads is leads


@pytest.mark.parametrize(
    ("words", "name", "chosen"),
    [
        ("--job night t.py", "night", True),
        ("--rdzv-id 4711 t.py", "4711", True),
        ("--rdzv-id 4711 --job night t.py", "night", True),
        ("my-train.v2.py", "my-train.v2-0123", False),
        ("-m pkg.sub.train", "train-0123", False),
        ("./.hidden.py", "hidden-0123", False),
        ("--nnodes 2 --rdzv-endpoint n:5 train.py", "train-5", False),
    ],
)
def test_the_job_gets_its_name(words: str, name: str, chosen: bool) -> None:
    made_plan = made(words)
    assert (made_plan.spec.job, made_plan.chosen) == (name, chosen)


def test_the_id_of_the_rendezvous_reaches_the_ranks_where_the_name_differs() -> None:
    assert made("--rdzv-id 4711 --job night t.py").spec.env == {"TORCHELASTIC_RUN_ID": "4711"}
    assert made("--rdzv-id 4711 t.py").spec.env == {}
    assert made("--role trainer t.py").spec.env == {"ROLE_NAME": "trainer"}


@pytest.mark.parametrize(
    ("asked", "gpus", "ranks"),
    [("3", 0, 3), ("cpu", 8, 6), ("gpu", 8, 8), ("auto", 8, 8), ("auto", 0, 6)],
)
def test_ranks_are_counted_as_torchrun_does(asked: str, gpus: int, ranks: int) -> None:
    assert made(f"--nproc-per-node {asked} t.py", gpus=gpus).spec.nproc_per_node == ranks


def test_restarts_are_the_users_where_given() -> None:
    assert made("t.py").spec.policy.recoveries_max == 3
    assert made("--max-restarts 0 t.py").spec.policy.recoveries_max == 0


def test_run_path_wins_over_no_python() -> None:
    assert made("--no-python prog").spec.no_python
    assert not made("--run-path --no-python t.py").spec.no_python


def test_a_checkpoint_directory_is_taken_from_where_the_user_is() -> None:
    assert made("--checkpoint-dir ck t.py").spec.checkpoint.directory == "/home/u/ck"
    assert made("--checkpoint-dir /ck t.py").spec.checkpoint.directory == "/ck"
    local = made("--local-checkpoint-dir nvme t.py").spec.checkpoint.local_directory
    assert local == "/home/u/nvme"
    assert made("t.py").spec.checkpoint.local_directory == ""


@pytest.mark.parametrize(
    ("words", "least", "most", "looks"),
    [
        ("", 10.0, 600.0, True),
        ("--stall-limit 30", 30.0, 600.0, True),
        ("--stall-limit 45s:20m", 45.0, 1200.0, True),
        ("--stall-limit 1h", 3600.0, 3600.0, True),
        ("--no-hang-detection", 10.0, 600.0, False),
    ],
)
def test_the_limit_of_a_stall_is_the_users(
    words: str, least: float, most: float, looks: bool
) -> None:
    policy = made(f"--max-restarts 7 {words} t.py").spec.policy
    assert (policy.stall_min_s, policy.stall_max_s, policy.looks) == (least, most, looks)
    assert policy.recoveries_max == 7


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("soon", "is no time: write 30s, 10m, or 30s:20m."),
        ("0", "to turn it off, give --no-hang-detection."),
        ("10m:30s", "the longest time is shorter than the shortest."),
        ("10:", "is no time"),
    ],
)
def test_a_limit_of_a_stall_that_is_none_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=f"--stall-limit {text}.*{sentence}"):
        made(f"--stall-limit {text} t.py")


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("100", Every(steps=100)),
        ("90s", Every(seconds=90.0)),
        ("10m", Every(seconds=600.0)),
        ("2h", Every(seconds=7200.0)),
        ("0", Every()),
        ("0m", Every()),
    ],
)
def test_how_often_is_a_number_of_steps_or_a_time(text: str, every: Every) -> None:
    spec = made(f"--disk-every {text} --local-disk-every {text} t.py").spec.checkpoint
    assert (spec.disk_every, spec.local_disk_every) == (every, every)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("t.py", [0, 1, 2, 3]),
        ("-r 3 t.py", []),
        ("-r 0:3,2:3 t.py", [1, 3]),
        ("--local-ranks-filter 0,2 t.py", [0, 2]),
        ("--local-ranks-filter 0,2 -r 2:3 t.py", [0]),
    ],
)
def test_the_terminal_shows_the_ranks_that_were_asked_for(words: str, shown: list[int]) -> None:
    assert [rank for rank in range(4) if made(words).shown.shows(rank)] == shown


def test_nothing_is_hidden_unless_asked() -> None:
    assert Shown().shows(7)


@pytest.mark.parametrize(
    ("words", "bind"),
    [
        ("127.0.0.1:1", "127.0.0.1"),
        ("localhost:1", "127.0.0.1"),
        ("10.0.0.1:1", "0.0.0.0"),
        ("node0:1", "0.0.0.0"),
        ("[fe80::1]:1", "::"),
        ("[::1]:1", "::1"),
    ],
)
def test_a_loopback_endpoint_is_not_opened_to_the_network(words: str, bind: str) -> None:
    assert made(f"--nnodes 2 --rdzv-endpoint {words} t.py").address.bind == bind


def test_the_url_of_an_ipv6_endpoint_has_brackets() -> None:
    assert Address(host="fe80::1", port=5).url == "http://[fe80::1]:5"
    assert Address(host="node0", port=5).url == "http://node0:5"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--nnodes 2:4 t.py", "--nnodes 2:4 asks for a job that changes its size"),
        ("--nnodes 0 t.py", "--nnodes 0 is not a number of machines"),
        ("--nnodes two t.py", "--nnodes two is not a number of machines"),
        ("--nproc-per-node 0 t.py", "--nproc-per-node 0 is not a number of ranks"),
        ("--nproc-per-node xpu t.py", "--nproc-per-node xpu is not a number of ranks"),
        ("--nproc-per-node gpu t.py", "--nproc-per-node gpu: there is no NVIDIA GPU here"),
        ("--nnodes 3 --local-machines 2 t.py", "--nnodes 3 and --local-machines 2 differ"),
        ("--local-machines 0 t.py", "--local-machines 0: a job needs at least 1"),
        ("--local-machines 2 --node-rank 1 t.py", "--local-machines starts all machines"),
        ("--standalone --nnodes 2 t.py", "--standalone is one machine, and --nnodes says 2"),
        ("--standbys x t.py", "--standbys x is not a whole number: give one, or auto"),
        ("--standbys -1 t.py", "--standbys -1 is negative"),
        ("--max-restarts -1 t.py", "--max-restarts -1 is negative"),
        ("--disk-every -1 t.py", "--disk-every -1 is neither a number of steps nor a time: write"),
        ("--local-disk-every 5d t.py", "--local-disk-every 5d is neither a number of steps nor"),
        ("--local-checkpoint-dir s3://b t.py", "--local-checkpoint-dir s3://b is a URL"),
        ("--backup-every 0 t.py", "--backup-every 0: give 1 or more, or --no-backup"),
        ("--backup-rate -1 t.py", "--backup-rate -1 is negative"),
        ("--checkpoint-dir s3://b/x t.py", "--checkpoint-dir: s3://b/x could not be opened"),
        ("--nnodes 2 --node-rank 2 t.py", "--node-rank 2 is not a position among 2 machines"),
        ("--no-python -m t", "--module names Python code and --no-python says there is none"),
        ("--rdzv-backend etcd t.py", "--rdzv-backend etcd needs a server"),
        ("--nnodes 2 --rdzv-endpoint a:b t.py", "--rdzv-endpoint a:b is not of the form"),
        ("--nnodes 2 --rdzv-endpoint a:0 t.py", "Port 0 in a:0 means any free port"),
        ("--nnodes 2 --rdzv-endpoint a:70000 t.py", "--rdzv-endpoint: 70000 is not a port"),
        ("--rdzv-conf timeout t.py", "--rdzv-conf timeout is not KEY=VALUE"),
        ("--rdzv-conf is_host=2 t.py", "--rdzv-conf is_host=2 is not 1 or 0"),
        ("--rdzv-conf join_timeout=x t.py", "--rdzv-conf join_timeout=x is not a whole number"),
        ("--job a/b t.py", "--job 'a/b' cannot be the name of a directory"),
        ("--rdzv-id .. t.py", "--rdzv-id '..' cannot be the name of a directory"),
        ("-r 1 t.py", "--redirects 1: a rank's standard output and error are one file"),
        ("-r x t.py", "--redirects x is neither 0 or 3"),
        ("--local-ranks-filter a t.py", "--local-ranks-filter a is not a list of local ranks"),
    ],
)
def test_what_cannot_be_is_one_sentence(words: str, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        made(words)
    assert str(raised.value).startswith(sentence)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "directory"),
    [
        ("ckpts", "/home/u/ckpts"),
        ("/shared/ckpts", "/shared/ckpts"),
        ("file:///shared/ckpts", "/shared/ckpts"),
        ("memory://bucket/ckpts", "memory://bucket/ckpts"),
    ],
)
def test_checkpoints_lie_at_a_path_made_absolute_or_at_a_url(given: str, directory: str) -> None:
    assert made(f"--checkpoint-dir {given} t.py").spec.checkpoint.directory == directory


def test_backups_are_chosen_by_flags() -> None:
    chosen = made("--backup-every 3 --backup-rate 2 --backup-interface ib0 t.py").spec.checkpoint
    assert chosen.backup_interface == "ib0"
    assert (chosen.backup, chosen.backup_every, chosen.backup_bytes_per_s) == (True, 3, 2 << 20)
    assert not made("--no-backup t.py").spec.checkpoint.backup


def test_a_layout_is_read_and_must_be_that_of_the_job() -> None:
    layout = "--local-machines 4 --nproc-per-node 2 --layout tp=2,pp=2,dp=2,order=tp-cp-pp-dp"
    spec = made(f"{layout} t.py").spec.layout
    assert spec is not None
    assert (spec.tp, spec.pp, spec.dp, spec.order) == (2, 2, 2, ("tp", "cp", "pp", "dp"))
    assert made("t.py").spec.layout is None


def test_an_elastic_job_says_how_few_replicas_it_can_go_on_with() -> None:
    spec = made("--local-machines 3 --elastic-dp 2 t.py").spec
    assert spec.elastic == ElasticSpec(dp_min=2)
    words = "--local-machines 4 --nproc-per-node 2 --layout tp=2,pp=2,dp=2 --elastic-dp 1"
    assert made(f"{words} --elastic-sharded t.py").spec.elastic == ElasticSpec(sharded=True)
    assert made("--local-machines 3 t.py").spec.elastic is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--elastic-dp 0", "a job needs at least 1 replica"),
        ("--elastic-dp some", "is not a whole number"),
        ("--elastic-sharded", "--elastic-dp MIN is missing"),
        ("--elastic-dp 3", "no smaller number to go on with"),
        ("--layout tp=3 --elastic-dp 1", "has 1 data-parallel replicas"),
        ("--layout dp=3,ep=3 --elastic-dp 1", "with ep=3 experts are spread over the replicas"),
        ("--nproc-per-node 2 --layout tp=3,dp=2 --elastic-dp 1", "never fill fewer than 3"),
        ("--elastic-dp 1 --elastic-sharded --disk-every 0", "--disk-every 0 puts none there"),
        (
            "--elastic-dp 1 --elastic-sharded --checkpoint-dir memory://x",
            "on a file system that all machines share",
        ),
    ],
)
def test_an_elastic_job_that_makes_no_sense_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        made(f"--local-machines 3 {words} t.py")


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("tp=2", "is 2, but the job has 4 machines of 2 ranks, 8 in all"),
        ("tp=two", "'tp=two' is no size; write tp=8,pp=4,dp=2"),
        ("zero=8", "'zero=8' is no size"),
        ("dp=8,ep=3", "ep=3 does not divide dp\\*cp=8"),
    ],
)
def test_a_layout_of_another_job_is_refused(layout: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        made(f"--local-machines 4 --nproc-per-node 2 --layout {layout} t.py")


def test_keys_of_a_rendezvous_that_is_not_there_are_noted() -> None:
    made_plan = made("--nnodes 2 --rdzv-conf read_timeout=60,join_timeout=5 t.py")
    assert made_plan.join_timeout_s == 5
    (note,) = made_plan.notes
    assert note.startswith("--rdzv-conf read_timeout is ignored")


# --- checks --------------------------------------------------------------------------------------


def test_checks_are_on_unless_they_are_turned_off() -> None:
    assert made("train.py").spec.checks == ChecksSpec()
    assert not made("--no-checks train.py").spec.checks.on
    assert made("--metrics-port 9100 train.py").spec.checks.metrics_port == 9100
    with pytest.raises(UserError, match="--metrics-port: 70000 is not a port"):
        made("--metrics-port 70000 train.py")
    with pytest.raises(UserError, match="--metrics-port x is not a whole number"):
        made("--metrics-port x train.py")


def test_limits_of_checks_are_those_that_checks_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.CHECKS, WordsCheck.name, WordsCheck)
    limits = {"test.words": {"at_most": "warn"}}
    assert made("train.py", check_limits=limits).spec.checks.limits == limits
    with pytest.raises(UserError, match=r"there is no check 'test\.wrods'"):
        made("train.py", check_limits={"test.wrods": {}})
    with pytest.raises(UserError, match=r"test\.words has no limit 'of': it has at_most, off"):
        made("train.py", check_limits={"test.words": {"of": True}})
    with pytest.raises(UserError, match=r"limits of check test\.words: Expected `bool`"):
        made("train.py", check_limits={"test.words": {"off": 1}})


HOSTS = "--nnodes 2 --rdzv-endpoint head:1 "


def test_units_are_said_by_the_user_and_else_by_the_scheduler() -> None:
    assert made(f"{HOSTS} train.py").units == ()
    found = ("switch:leaf1", "block:b2")
    assert made(f"{HOSTS} train.py", units=found).units == found
    words = f"{HOSTS} --unit switch:s9 --unit rack:12 --unit switch:s8 train.py"
    assert made(words, units=found).units == ("switch:s9", "switch:s8", "rack:12", "block:b2")
    for wrong in ("leaf1", "switch:", ":leaf1", "Switch:leaf", "switch:a,b"):
        with pytest.raises(UserError, match=f"--unit {wrong} is not of the form KIND:NAME"):
            made(f"{HOSTS} --unit {wrong} train.py")


def test_stand_ins_share_everything_so_units_mean_nothing() -> None:
    made_plan = made("--local-machines 2 --unit switch:s1 train.py", units=("block:b",))
    assert made_plan.units == ()
    assert made_plan.notes == ("--unit is ignored: all machines are this host.",)
    assert made("--local-machines 2 train.py", units=("block:b",)).notes == ()
