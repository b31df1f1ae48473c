"""Findings of other people's monitors: what is taken, what is refused, what their token opens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from everstep.controller.findings import (
    AT_MOST,
    BODY_BYTES_MAX,
    OLDEST_S,
    Event,
    NoFindings,
    Translated,
    from_plain,
    from_webhook,
)
from everstep.controller.gate import OF_MONITORS, findings_token
from everstep.controller.views import status
from everstep.core.alerts import alert_cleared, alert_raised
from everstep.core.state import Machine, Phase, State
from everstep.diagnosis.words import Category, Verdict
from everstep.events import AlertCleared, AlertRaised
from everstep.health import Counts
from everstep.journal.records import Reader
from everstep.model import CheckpointSpec, JobId, JobSpec, MachineId
from tests.controller.support import TOKEN, Controller, FakeAgent, controller, make_job, wait_for
from tests.house.documents import blocks

NOW = 1_800_000_000.0
MONITORS = findings_token(TOKEN)


def machine(name: str, host: str, address: str, **more: Any) -> Machine:
    return Machine(machine=MachineId(name), agent="x", host=host, address=address, **more)


def state(*events: Event) -> State:
    """Of a job with machines in and out of it, after these events."""
    machines = (
        machine("m0", "node-07", "10.0.0.7"),
        machine("m1", "node-08.cluster.example", "fe80::8"),
        machine("m2", "laptop", "127.0.0.10"),
        machine("m3", "laptop", "127.0.0.11"),
        machine("m4", "node-09", "10.0.0.9", evicted="it broke"),
        machine("m5", "node-10", "10.0.0.10", released=True),
    )
    spec = JobSpec(
        job=JobId("j"),
        uid="0",
        command=("t.py",),
        working_dir="/",
        nnodes=4,
        nproc_per_node=1,
        checkpoint=CheckpointSpec(directory="/checkpoints"),
    )
    made = State(spec=spec, machines={each.machine: each for each in machines})
    for event in events:
        if isinstance(event, AlertRaised):
            alert_raised(made, event, NOW)
        else:
            alert_cleared(made, event, NOW)
    return made


def plain(**changed: Any) -> dict[str, Any]:
    """A finding that is taken, with what is said otherwise."""
    finding = {
        "machine": "m0",
        "item": "eth0",
        "verdict": "suspect",
        "at": NOW - 5,
        "text": "the link is down",
        "source": "netwatch",
    }
    return {key: value for key, value in {**finding, **changed}.items() if value is not None}


def alert(status: str = "firing", **labels: str) -> dict[str, Any]:
    """An alert as Alertmanager sends it, about m0."""
    stamp = datetime.fromtimestamp(NOW - 20, UTC).isoformat().replace("+00:00", "Z")
    return {
        "status": status,
        "labels": {"alertname": "NodeNetworkDown", "instance": "node-07:9100", **labels},
        "annotations": {
            "summary": "eth0 of node-07\nis down",
            "runbook_url": "https://w.example/n",
        },
        "startsAt": stamp,
        "endsAt": "0001-01-01T00:00:00Z" if status == "firing" else stamp,
        "generatorURL": "https://prometheus.example/graph",
        "fingerprint": "a1b2",
    }


def notification(*alerts: dict[str, Any], **changed: Any) -> bytes:
    told = {"version": "4", "status": "firing", "receiver": "everstep", "groupKey": "{}"}
    return json.dumps({**told, "alerts": alerts, **changed}).encode()


def told_plain(*findings: dict[str, Any], after: Sequence[Event] = ()) -> Translated:
    return from_plain(json.dumps({"findings": findings}).encode(), state(*after), NOW)


def told(*alerts: dict[str, Any], after: Sequence[Event] = ()) -> Translated:
    return from_webhook(notification(*alerts), state(*after), NOW)


def raised(translated: Translated) -> AlertRaised:
    (event,) = translated.events
    assert isinstance(event, AlertRaised)
    return event


def refused(translated: Translated) -> str:
    assert not translated.events
    (answer,) = translated.answers.findings
    assert not answer.accepted
    assert "\n" not in answer.why
    return answer.why


# --- the plain form ------------------------------------------------------------------------------


def test_a_finding_becomes_an_alert_of_its_machine_in_the_name_of_its_monitor() -> None:
    event = raised(told_plain(plain(check="port", category="infiniband_error", counts="twice")))
    assert event.machine == "m0"
    assert event.alert.source == "netwatch"
    assert event.alert.age_s == 5
    result = event.alert.result
    assert (result.check, result.item, result.why) == ("port", "eth0", "the link is down")
    assert result.verdict is Verdict.SUSPECT
    assert result.category is Category.INFINIBAND_ERROR
    assert result.counts is Counts.TWICE


@pytest.mark.parametrize("how", [{"resolved": True}, {"verdict": "info"}])
def test_a_finding_that_is_over_or_well_clears_what_was_raised(how: dict[str, Any]) -> None:
    first = raised(told_plain(plain(at=NOW - 300)))
    (event,) = told_plain(plain(**how), after=[first]).events
    check, item = first.alert.result.key
    assert event == AlertCleared(machine=MachineId("m0"), check=check, item=item, source="netwatch")
    over: list[Event] = [first, event]
    assert told_plain(plain(**how), after=over).events == [], "nothing holds any more"
    assert raised(told_plain(plain(at=NOW), after=over)), "it may come again"


@pytest.mark.parametrize("other", [{"item": "eth1"}, {"source": "x"}, {"check": "x"}])
def test_what_is_over_clears_nothing_else(other: dict[str, Any]) -> None:
    first = raised(told_plain(plain(**other)))
    taken = told_plain(plain(resolved=True), after=[first])
    assert (taken.answers.accepted, taken.events) == (1, [])


def test_an_end_that_comes_late_does_not_hide_what_has_come_again_since() -> None:
    again = raised(told_plain(plain(at=NOW - 10)))
    late = told_plain(plain(resolved=True, at=NOW - 100), after=[again])
    assert "it was over 90 s before it was raised again" in refused(late)


def test_what_a_monitor_repeats_is_journalled_once() -> None:
    first = raised(told_plain(plain(at=NOW - 60)))
    again = told_plain(plain(at=NOW - 60), after=[first])
    assert (again.answers.accepted, again.events) == (1, [])
    assert again.answers.findings[0].machines == ("m0",)
    assert raised(told_plain(plain(at=NOW - 60, verdict="evict"), after=[first]))
    assert raised(told_plain(plain(at=NOW - 60, counts="twice"), after=[first]))
    assert raised(told_plain(plain(at=NOW), after=[first])), "it has occurred again"


@pytest.mark.parametrize(
    ("name", "machines"),
    [
        ("m0", ["m0"]),
        ("node-07", ["m0"]),
        ("NODE-07", ["m0"]),
        ("node-07:9100", ["m0"]),
        ("node-07.cluster.example", ["m0"]),
        ("node-07.cluster.example.:9100", ["m0"]),
        ("10.0.0.7", ["m0"]),
        ("10.0.0.7:9400", ["m0"]),
        ("node-08", ["m1"]),
        ("fe80::8", ["m1"]),
        ("fe80:0:0::8", ["m1"]),
        ("[fe80::8]:9100", ["m1"]),
        ("127.0.0.11", ["m3"]),
        ("laptop", ["m2", "m3"]),
    ],
)
def test_machines_are_known_by_all_their_names(name: str, machines: list[str]) -> None:
    events = told_plain(plain(machine=name)).events
    assert [event.machine for event in events] == machines


def test_what_is_said_of_a_host_of_several_stand_ins_is_one_accuser() -> None:
    events = told_plain(plain(machine="laptop")).events
    causes = {event.alert.result.cause for event in events if isinstance(event, AlertRaised)}
    assert causes == {"host laptop"}
    assert raised(told_plain(plain())).alert.result.cause == ""


@pytest.mark.parametrize("name", ["node-0", "node", "10", "10.0.0", "m", "m9", "node-08.other.org"])
def test_no_machine_is_meant_by_half_a_name(name: str) -> None:
    assert f"{name} is no machine of this job: it has m0" in refused(
        told_plain(plain(machine=name))
    )


@pytest.mark.parametrize("name", ["m4", "node-09", "10.0.0.9", "m5", "node-10"])
def test_a_machine_that_has_left_is_none_of_the_job(name: str) -> None:
    assert "is no machine of this job" in refused(told_plain(plain(machine=name)))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"verdict": "broken"}, "verdict 'broken' is none of info, warn, suspect, evict"),
        ({"verdict": "error"}, "verdict 'error' is none of"),
        ({"verdict": None}, "missing required field `verdict`"),
        ({"machine": ""}, "length >= 1"),
        ({"machine": 7}, "Expected `str`"),
        ({"machine": "x" * 201}, "length <= 200"),
        ({"at": NOW - OLDEST_S - 60}, "it is 11 min old"),
        ({"at": 0}, "min old"),
        ({"at": NOW + 120}, "its time is 120 s ahead of the controller's: compare the clocks"),
        ({"at": 1e300}, "ahead"),
        ({"at": "yesterday"}, "RFC3339"),
        ({"at": "2026-11-29T19:00:00"}, "timezone"),
        ({"at": True}, "Expected `float | datetime`"),
        ({"category": "bad luck"}, "category 'bad luck' is none of cuda_error"),
        ({"counts": "thrice"}, "counts 'thrice' is none of never, twice"),
        ({"source": "agent"}, "source 'agent' is a name of everstep's own"),
        ({"source": "node service"}, "a name of everstep's own"),
        ({"source": "controller"}, "a name of everstep's own"),
        ({"source": ""}, "length >= 1"),
    ],
)
def test_a_finding_that_cannot_be_taken_is_refused_in_one_sentence(
    changed: dict[str, Any], says: str
) -> None:
    assert says in refused(told_plain(plain(**changed)))


def test_what_is_refused_does_not_keep_the_others_out() -> None:
    taken = told_plain(plain(), plain(verdict="?"), {}, plain(item="eth1"))
    assert [answer.accepted for answer in taken.answers.findings] == [True, False, False, True]
    assert (taken.answers.accepted, taken.answers.refused) == (2, 2)
    assert len(taken.events) == 2


def test_a_time_may_be_rfc_3339_and_a_little_ahead() -> None:
    stamp = datetime.fromtimestamp(NOW - 7, UTC).isoformat()
    assert raised(told_plain(plain(at=stamp))).alert.age_s == 7
    assert raised(told_plain(plain(at=NOW + 3))).alert.age_s == 0


def test_a_long_text_is_cut_and_stays_on_one_line() -> None:
    why = raised(told_plain(plain(text="a\n b " * 1000))).alert.result.why
    assert why.startswith("a b a b")
    assert why.endswith("...")
    assert len(why) == 500


def test_more_than_one_request_may_bring_is_refused_and_the_first_are_taken() -> None:
    taken = told_plain(*(plain(item=str(n)) for n in range(AT_MOST + 2)))
    assert len(taken.events) == AT_MOST
    assert [answer.accepted for answer in taken.answers.findings[-3:]] == [True, False, False]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"findings": 1}', b"\xff", b'{"alerts": []}'])
def test_a_body_that_is_no_list_of_findings_is_refused_as_a_whole(body: bytes) -> None:
    with pytest.raises(NoFindings, match="not what it should be"):
        from_plain(body, state(), NOW)


def test_what_holds_is_shown_the_gravest_first_and_not_of_machines_that_left() -> None:
    said = [
        raised(told_plain(plain(machine="m1", verdict="warn", at=NOW - 60))),
        raised(told_plain(plain(machine="m1", verdict="evict", item="eth1"))),
        raised(told_plain(plain(machine="m0", verdict="warn", at=NOW - 90))),
    ]
    gone = msgspec.structs.replace(said[0], machine=MachineId("m4"))
    shown = status(state(*said, gone), NOW).alerts
    assert [(each.machine, each.verdict) for each in shown] == [
        ("m1", Verdict.EVICT),
        ("m0", Verdict.WARN),
        ("m1", Verdict.WARN),
    ]
    assert (shown[1].since, shown[1].age_s, shown[1].source) == (NOW - 90, 90, "netwatch")


# --- Alertmanager's form -------------------------------------------------------------------------


def test_a_firing_alert_becomes_an_alert_in_the_name_of_its_receiver() -> None:
    event = raised(told(alert(severity="warning", device="eth0")))
    assert event.machine == "m0"
    assert event.alert.source == "everstep"
    assert event.alert.age_s == 20
    result = event.alert.result
    assert (result.check, result.item) == ("NodeNetworkDown/warning", "device eth0")
    assert result.why == "eth0 of node-07 is down"
    assert result.do == "See https://w.example/n."
    assert result.counts is Counts.NEVER


def test_a_resolved_alert_clears_the_one_that_fired_and_no_namesake() -> None:
    labels = {"device": "eth0", "severity": "critical"}
    first = raised(told(alert(**labels)))
    warning = raised(told(alert(device="eth0", severity="warning")))
    (event,) = told(alert("resolved", **labels), after=[warning, first]).events
    assert event == AlertCleared(
        machine=MachineId("m0"),
        check="NodeNetworkDown/critical",
        item="device eth0",
        source="everstep",
    )


def test_an_alert_of_severity_info_changes_nothing() -> None:
    taken = told(alert(severity="info"))
    assert (taken.answers.accepted, taken.events) == (1, [])


@pytest.mark.parametrize(
    ("labels", "verdict"),
    [
        ({}, Verdict.WARN),
        ({"severity": "critical"}, Verdict.SUSPECT),
        ({"severity": "warning"}, Verdict.WARN),
        ({"severity": "critical", "everstep_verdict": "evict"}, Verdict.EVICT),
        ({"severity": "critical", "everstep_verdict": "warn"}, Verdict.WARN),
        ({"severity": "P1", "everstep_verdict": "job"}, Verdict.JOB),
    ],
)
def test_no_severity_evicts_and_a_label_of_ours_does(
    labels: dict[str, str], verdict: Verdict
) -> None:
    assert raised(told(alert(**labels))).alert.result.verdict is verdict


def test_labels_of_ours_say_category_item_and_what_counts() -> None:
    labels = {
        "everstep_category": "infiniband_error",
        "everstep_counts": "twice",
        "everstep_item": "port 1",
        "device": "mlx5_0",
    }
    result = raised(told(alert(**labels))).alert.result
    assert (result.category, result.counts) == (Category.INFINIBAND_ERROR, Counts.TWICE)
    assert result.item == "port 1"


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"machine": "m1"}, "m1"),
        ({"node": "node-08", "instance": "10.0.0.7:8080"}, "m1"),
        ({"node": "unknown", "instance": "node-07:9100"}, "m0"),
        ({"instance": "other:9100", "host": "node-08"}, "m1"),
        ({"instance": "", "nodename": "node-08"}, "m1"),
        ({"instance": "", "kubernetes_node": "node-07"}, "m0"),
    ],
)
def test_the_first_label_that_names_a_machine_of_the_job_counts(
    labels: dict[str, str], expected: str
) -> None:
    assert raised(told(alert(**labels))).machine == expected


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (alert(severity="P1"), "severity 'P1' is none of critical, warning, info: add a label"),
        (alert(everstep_verdict="kill"), "verdict 'kill' is none of"),
        (alert(everstep_category="x"), "category 'x' is none of"),
        (alert(instance="elsewhere:9100"), "elsewhere:9100 is no machine of this job"),
        (alert(instance=""), "none of the labels machine, node, instance"),
        (alert("pending"), "status is 'pending'"),
        ({"status": "firing"}, "missing required field `labels`"),
        ({**alert(), "startsAt": "2020-01-01T00:00:00Z"}, "min old"),
        ({**alert(), "startsAt": "?"}, "RFC3339"),
    ],
)
def test_an_alert_that_cannot_be_taken_is_refused_in_one_sentence(
    changed: dict[str, Any], says: str
) -> None:
    assert says in refused(told(changed))


def test_another_version_of_the_form_and_a_receiver_of_our_name_are_refused() -> None:
    with pytest.raises(NoFindings, match="version 5 of Alertmanager's form: 4 is understood"):
        from_webhook(notification(alert(), version="5"), state(), NOW)
    translated = from_webhook(notification(alert(), receiver="agent"), state(), NOW)
    assert "a name of everstep's own" in refused(translated)


# --- over HTTP, against a real controller --------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """A controller with the running job of one machine "a" on host "here"."""
    with controller(make_job(tmp_path_factory.mktemp("job"))) as running:
        agent = FakeAgent()
        agent.start(running.endpoint().url)
        wait_for("running", lambda: running.status().phase is Phase.RUNNING)
        yield running
        agent.disconnect()


def alerts_journalled(running: Controller) -> list[AlertRaised | AlertCleared]:
    events = [entry.record.event for entry in Reader(running.paths.journal / "records")]
    return [event for event in events if isinstance(event, AlertRaised | AlertCleared)]


def test_findings_are_journalled_before_they_are_answered(served: Controller) -> None:
    before = len(alerts_journalled(served))
    findings = [plain(machine="here", at=time.time()), plain(machine="x", at=time.time())]
    response = served.post("/v1/findings", {"findings": findings}, token=MONITORS)
    assert response.status_code == 207
    assert response.json()["accepted"] == 1
    assert "x is no machine of this job" in response.json()["findings"][1]["why"]
    (new,) = alerts_journalled(served)[before:]
    assert isinstance(new, AlertRaised)
    assert (new.machine, new.alert.source) == ("a", "netwatch")


def test_alertmanager_is_answered_with_success(served: Controller) -> None:
    before = len(alerts_journalled(served))
    now = datetime.now(UTC).isoformat()
    firing = {**alert(instance="here:9100"), "startsAt": now}
    resolved = {**alert("resolved", instance="here:9100"), "startsAt": now, "endsAt": now}
    for each in (firing, resolved):
        response = served.post("/v1/alertmanager", notification(each), token=MONITORS)
        assert response.status_code == 200
        assert response.json()["findings"] == [{"accepted": True, "machines": ["a"], "why": ""}]
        standing = {each.check for each in served.status().alerts}
        assert ("NodeNetworkDown" in standing) is (each is firing)
    new = alerts_journalled(served)[before:]
    assert [type(event) for event in new] == [AlertRaised, AlertCleared]


def test_the_jobs_own_token_may_bring_findings_too(served: Controller) -> None:
    assert served.post("/v1/findings", {"findings": []}).status_code == 200


def test_a_monitor_brings_a_finding_as_the_page_says(served: Controller, tmp_path: Path) -> None:
    (block,) = [each for each in blocks() if "curl" in each.commands]
    assert block.place.startswith("docs/checks.md")
    before = len(alerts_journalled(served))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.commands.replace("node-07", "here")],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "EVERSTEP_HOME": str(served.paths.root.parent),
            "CONTROLLER": served.endpoint().url,
            "no_proxy": "*",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout)["accepted"] == 1
    (new,) = alerts_journalled(served)[before:]
    assert isinstance(new, AlertRaised)
    assert (new.alert.source, new.alert.result.item) == ("fabric", "port 12")


@pytest.mark.parametrize("path", ["/v1/status", "/v1/why/1", "/v1/output", "/v1/findingsx", "/"])
def test_the_token_of_monitors_opens_nothing_else(served: Controller, path: str) -> None:
    response = served.get(path, token=MONITORS)
    assert response.status_code == 403
    assert "this token is for findings" in response.json()["error"]


def test_the_token_of_monitors_stops_no_job(served: Controller) -> None:
    assert served.post("/v1/stop", {"by": "a monitor"}, token=MONITORS).status_code == 403
    assert served.status().outcome is None


@pytest.mark.parametrize("path", OF_MONITORS)
@pytest.mark.parametrize("token", ["", "wrong", findings_token("another job's")])
def test_findings_need_a_token(served: Controller, path: str, token: str) -> None:
    assert served.post(path, {"findings": []}, token=token).status_code == 401


def test_the_jobs_token_does_not_follow_from_that_of_monitors() -> None:
    assert findings_token(TOKEN) != findings_token(TOKEN + "x")
    assert TOKEN not in MONITORS
    assert findings_token(MONITORS) != MONITORS


@pytest.mark.parametrize("path", OF_MONITORS)
def test_a_body_that_is_none_is_refused(served: Controller, path: str) -> None:
    response = served.post(path, b"{", token=MONITORS)
    assert response.status_code == 400
    assert "the request's body" in response.json()["error"]


@pytest.mark.parametrize("whole", [True, False], ids=["with its length", "in pieces"])
def test_a_body_without_measure_is_refused(served: Controller, whole: bool) -> None:
    piece = b" " * 65536
    count = BODY_BYTES_MAX // len(piece) + 1
    content = piece * count if whole else (piece for _ in range(count))
    response = httpx2.post(
        served.endpoint().url + "/v1/findings",
        headers={"Authorization": f"Bearer {MONITORS}"},
        content=content,
        trust_env=False,
    )
    assert response.status_code == 413
    assert "send less" in response.json()["error"]
