"""Lines as trainers print them become samples; everything else becomes nothing."""

from __future__ import annotations

import math
import re

import pytest

from everstep.diagnosis.columns import Table
from everstep.diagnosis.progress import PREFILTER, Pattern, Reader
from everstep.diagnosis.sample import Sample

MEGATRON = (
    " [2026-05-04 07:20:00] iteration    61410/  400000 | consumed samples:     94325760 | elapsed"
    " time per iteration (ms): 13833.6 | throughput per GPU (TFLOP/s/GPU): 386.9 | learning rate:"
    " 2.010000E-04 | global batch size:  1536 | lm loss: 2.012202E+00 | loss scale: 1.0 | grad"
    " norm: 0.207 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
TITAN = (
    "\x1b[36m[rank0]:[titan] 2026-01-05 11:40:03,114 - root - INFO - \x1b[31mstep: 10 "
    " \x1b[32mloss:  7.91230  \x1b[38;2;180;60;0mgrad_norm:  1.2345  \x1b[34mtps: 7,123 "
    " \x1b[36mtflops: 300.12  \x1b[35mmfu: 30.40%\x1b[39m"
)
VERL = (
    "\x1b[36m(TaskRunner pid=41172)\x1b[0m step:118 - global_seqlen/mean:159906.0 -"
    " actor/pg_loss:-0.0036 - actor/grad_norm:0.205 - perf/mfu/actor:0.41 - actor/lr:1e-06 -"
    " training/global_step:118 - timing_s/step:84.1 - perf/throughput:1234.5"
)

SAID: list[tuple[str, dict[str, float]]] = [
    (
        MEGATRON,
        {"step": 61410, "loss": 2.012202, "grad_norm": 0.207, "step_s": 13.8336, "tflops": 386.9}
        | {"lr": 2.01e-4, "batch": 1536, "loss_scale": 1.0, "at": 1777879200.0},
    ),
    (
        TITAN,
        {"step": 10, "loss": 7.9123, "grad_norm": 1.2345, "tokens_per_s": 7123, "mfu": 0.304},
    ),
    (
        VERL,
        {"step": 118, "loss": -0.0036, "grad_norm": 0.205, "mfu": 0.41, "step_s": 84.1}
        | {"tokens_per_s": 1234.5},
    ),
    (
        (
            "[2026-11-07 01:55:23,714] [INFO] [timer.py:260:stop] epoch=0/micro_step=40/global_ste"
            "p=10, RunningAvgSamplesPerSec=25.0, CurrSamplesPerSec=25.7, MemAllocated=4.32GB"
        ),
        {"step": 10, "samples_per_s": 25.7},
    ),
    (
        (
            "[2026-11-07 01:55:23,711] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=4,"
            " lr=[4.9e-05, 4.9e-05], mom=[(0.9, 0.95), (0.9, 0.95)]"
        ),
        {"step": 10, "skipped": 4, "lr": 4.9e-5},
    ),
    (
        (
            "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 8388608, reducing to"
            " 4194304"
        ),
        {"loss_scale": 4194304, "skipped": 1},
    ),
    (
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0",
        {"loss_scale": 32768, "skipped": 1},
    ),
    (
        (
            "Training epoch 0, iteration 1/249 | lr: 3.922e-06 | global_batch_size: 8 | global_step"
            ": 1 | reduced_train_loss: 1.653 | train_step_timing in s: 2.505 | consumed_samples: 16"
        ),
        {"step": 1, "loss": 1.653, "step_s": 2.505, "batch": 8},
    ),
    (
        (
            "  3%|#         | 30/1000 [01:30<48:00,  2.97s/it]{'loss': 8.91, 'grad_norm': 4.0,"
            " 'learning_rate': 2.6e-06, 'epoch': 0.03}"
        ),
        {"step": 30, "loss": 8.91, "grad_norm": 4.0, "step_s": 2.97},
    ),
    (
        "Epoch 2:  12%|#2   | 120/1000 [00:12<01:30,  9.80it/s, v_num=0, train_loss=2.310]",
        {"step": 2120, "loss": 2.31, "step_s": 1 / 9.8},
    ),
    (
        "1|12|Loss: 2.31: 0%| | 12/1000 [00:10<10:00, 1.01s/it]",
        {"step": 12, "loss": 2.31, "epoch": 1},
    ),
    (
        "iter 100: loss 3.4012, time 131.20ms, mfu 12.30%",
        {"step": 100, "loss": 3.4012, "step_s": 0.1312, "mfu": 0.123},
    ),
    ("step 12 loss 3.4", {"step": 12, "loss": 3.4}),
    ("0: step 5, loss: tensor(2.31, device='cuda:0')", {"step": 5, "loss": 2.31}),
    (
        (
            "step  12/1000 | loss 7.2 (+0.1z)| norm 1.23 (0.2z)| lr 1e-4 | 100.20 ms | 45.2% bf16"
            " MFU | 123456 tok/s"
        ),
        {"step": 12, "loss": 7.2, "grad_norm": 1.23, "step_s": 0.1002, "mfu": 0.452}
        | {"tokens_per_s": 123456},
    ),
    ("step:10/1390 train_loss:6.50 train_time:1234ms", {"step": 10, "loss": 6.5}),
    (
        '{"step": 12, "train/loss": NaN, "tokens_per_sec": 12345.6}',
        {"step": 12, "loss": math.nan, "tokens_per_s": 12345.6},
    ),
    (
        (
            '| INFO | train_inner | {"epoch": 1, "update": 0.2, "loss": "4.2", "wps": "81000",'
            ' "num_updates": "1200", "gnorm": "0.5", "loss_scale": "64"}'
        ),
        {"step": 1200, "loss": 4.2, "grad_norm": 0.5, "tokens_per_s": 81000},
    ),
    (
        (
            "completed step: 12, seconds: 3.200, TFLOP/s/device: 170.1, Tokens/s/device: 1234.5,"
            " total_weights: 65536, loss: 3.4"
        ),
        {"step": 12, "loss": 3.4, "step_s": 3.2, "tflops": 170.1, "tokens_per_s": 1234.5},
    ),
    ("Epoch: [3][ 100/5005]\tTime  0.31 ( 0.33)\tLoss 6.93 (6.95)", {"step": 15115, "loss": 6.93}),
    ("INFO host=node-03 rank=12 step=7 loss=inf", {"step": 7, "loss": math.inf, "rank": 12}),
]

SAY_NOTHING = [
    "",
    "Saved checkpoint /ckpt/step=1200-loss=2.31.ckpt",
    "saving /data/loss=3.2/step_100",
    "{'eval_loss': 2.3, 'eval_runtime': 1.2, 'epoch': 0.5}",
    "{'train_runtime': 123.4, 'train_samples_per_second': 12.3, 'train_loss': 2.3, 'epoch': 1.0}",
    "[titan] validate step: 10  loss:  7.9123  memory: 30.12GiB(38.03%)  tps: 7,123",
    "step 250: train loss 2.4001, val loss 2.5002",
    "step:125/1390 val_loss:4.5012 train_time:1234ms step_avg:123.4ms",
    "validation loss at iteration 1000 | lm loss value: 2.1E+00 | lm loss PPL: 8.2E+00",
    "(TaskRunner pid=7) step:20 - val-core/math/reward/mean@1:0.5 - val-aux/math/std@4:nan",
    '{"step": 12, "split": "val", "loss": 2.3}',
    "INFO step 12 best loss 2.1",
    "Map:  12%|#2   | 1200/10000 [00:12<01:30,  98.0 examples/s]",
    "Validation DataLoader 0:  12%|#2   | 12/100 [00:12<01:30,  1.0it/s, loss=2.3]",
    "args: train_iters=100, loss_scale=1024, lr=0.01",
    "NaN loss detected at step 40",
    "KeyError: 'loss'",
    "nccl: rank 3 of 8, step 5 of the handshake took 12 ms",
]


def _values(sample: Sample) -> dict[str, object]:
    return {name: getattr(sample, name) for name in sample.__struct_fields__}


@pytest.mark.parametrize(("line", "expected"), SAID)
def test_a_line_of_a_trainer_says_what_it_says(line: str, expected: dict[str, float]) -> None:
    (sample,) = Reader().read(line, 7)
    found = _values(sample)
    assert sample.line == 7
    for field, value in expected.items():
        assert found[field] == pytest.approx(value, nan_ok=True), (field, found)


@pytest.mark.parametrize("line", SAY_NOTHING)
def test_a_line_that_is_no_report_of_training_gives_nothing(line: str) -> None:
    assert Reader().read(line) == []


@pytest.mark.parametrize("line", [line for line, _ in SAID])
def test_the_pre_filter_lets_every_report_through(line: str) -> None:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
    assert any(re.search(pattern, plain) for pattern in PREFILTER)


def test_the_pre_filter_is_for_engines_without_look_around() -> None:
    assert not [p for p in PREFILTER if re.search(r"\(\?[=!<]|\\[1-9]", p)]


@pytest.mark.parametrize("label", ["[default0]:[rank0]:", "3: ", "(main_task pid=7) ", "node-1: "])
def test_labels_before_a_line_change_nothing(label: str) -> None:
    (sample,) = Reader().read(label + MEGATRON)
    assert (sample.step, sample.loss) == (61410, 2.012202)


def test_a_missing_loss_is_a_fact_and_not_a_dropped_line() -> None:
    (sample,) = Reader().read(
        MEGATRON.replace(" lm loss: 2.012202E+00 |", "").replace("0.207", "nan")
    )
    assert sample.loss is None
    assert sample.grad_norm is not None
    assert math.isnan(sample.grad_norm)


def test_a_host_is_named_by_pairs_and_by_json() -> None:
    lines = ("host=node-03 step=7 loss=2.0", '{"hostname": "node-03", "step": 7, "loss": 2.0}')
    assert [Reader().read(line)[0].host for line in lines] == ["node-03", "node-03"]


def test_bars_and_reports_glued_by_carriage_returns_are_all_read() -> None:
    reader = Reader()
    text = "\r".join(
        f"  0%| | {step}/48000 [00:09<39:53:03, 2.95s/it]{{'loss': {9 - step / 100:.2f},"
        f" 'learning_rate': 1e-05, 'epoch': 0.0}}"
        for step in (10, 20, 30)
    )
    assert [(s.step, s.loss) for s in reader.read(text)] == [(10, 8.9), (20, 8.8), (30, 8.7)]


def test_a_report_over_several_lines_is_one_sample() -> None:
    reader = Reader()
    lines = [
        "[batch=12/500]:",
        "\t Train time/batch: 11",
        "\t Train loss/train/total: 1.8421",
        "\t Train throughput/tokens_per_sec: 41000.5",
        "[batch=13/500]:",
        "\t Train loss/train/total: nan",
    ]
    found = [sample for line in lines for sample in reader.read(line)] + reader.end()
    assert [s.step for s in found] == [12, 13]
    assert (found[0].loss, found[0].tokens_per_s) == (1.8421, 41000.5)
    assert found[1].loss is not None
    assert math.isnan(found[1].loss)


def test_a_running_total_of_skipped_updates_becomes_differences() -> None:
    reader = Reader()
    lines = [
        f"[Rank 0] step={step}, skipped={skipped}, lr=[1e-05]"
        for step, skipped in ((10, 7), (20, 7), (30, 9))
    ]
    found = [sample for line in lines for sample in reader.read(line)]
    assert [sample.skipped for sample in found] == [7, 0, 2]


def test_a_site_adds_its_own_format() -> None:
    pattern = Pattern.of(r"STEP<(?P<step>\d+)> L=(?P<loss>\S+) V=(?P<tokens_per_s>\d+)")
    (sample,) = Reader([pattern]).read("STEP<17> L=2.25 V=5100 whatever loss=9")
    assert (sample.step, sample.loss, sample.tokens_per_s) == (17, 2.25, 5100)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (r"step (?P<step>\d+", "no regular expression"),
        (r"loss (?P<loss>\d+)", "no group named step"),
        (r"(?P<step>\d+) (?P<losss>\d+)", "unknown group losss"),
    ],
)
def test_a_pattern_that_cannot_work_is_refused_with_the_reason(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Pattern.of(text)


def test_a_table_is_read_by_the_names_of_its_columns() -> None:
    table = Table.of("step,train/loss,grad_norm,host_rss_gb,note")
    assert table is not None
    row = table.row("12,2.5,nan,130.5,", 3)
    assert row is not None
    assert row.sample is not None
    assert (row.sample.step, row.sample.loss, row.sample.host_gb) == (12, 2.5, 130.5)
    assert row.sample.grad_norm is not None
    assert math.isnan(row.sample.grad_norm)


@pytest.mark.parametrize("header", ["a,b,c", "step,note", "hello world", "2026-01-01 step loss"])
def test_what_is_no_header_of_numbers_makes_no_table(header: str) -> None:
    assert Table.of(header) is None


def test_an_empty_cell_says_nothing_and_an_evaluation_is_no_sample() -> None:
    table = Table.of("epoch,step,train_loss,val_loss")
    assert table is not None
    trained, evaluated = table.row("0,49,2.5,", 2), table.row("0,99,,2.6", 3)
    assert trained is not None
    assert trained.sample is not None
    assert evaluated is not None
    assert evaluated.sample is None
