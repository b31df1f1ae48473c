"""Under which names trainers print what: one table for log lines and for columns of metric files.

Used by progress.py and columns.py. A name is compared without case, blanks, slashes and brackets,
so "throughput per GPU (TFLOP/s/GPU)" is throughput_per_gpu_tflop_s_gpu. What is not here is not
read: "val_loss", "best loss" and "aux_loss" are no training loss.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple


class Meaning(NamedTuple):
    """A field of progress.Sample, and what the printed number is multiplied with."""

    field: str
    factor: float = 1.0
    rank: int = 0
    """Of two names for one field on a line the one with the lower rank counts."""


def _names(field: str, names: str, factor: float = 1.0, rank: int = 0) -> dict[str, Meaning]:
    return {name: Meaning(field, factor, rank) for name in names.split()}


MEANINGS: dict[str, Meaning] = {
    **_names("step", "global_step trainer_global_step training_global_step train_global_step"),
    **_names("step", "step train_step training_step optimizer_step completed_step _step", rank=1),
    **_names("step", "iteration iter it num_updates batch train_iter", rank=2),
    **_names("step", "update", rank=3),
    **_names("epoch", "epoch training_epoch train_epoch"),
    **_names(
        "loss",
        "loss lm_loss train_loss training_loss train_loss_step loss_step step_loss batch_loss"
        " reduced_train_loss global_avg_loss avg_loss mean_loss loss_mean loss_avg ce_loss nll_loss"
        " loss_train_total train_loss_train_total loss_metrics_global_avg_loss policy_loss"
        " loss_train"
        " train_crossentropyloss train_cross_entropy_loss actor_pg_loss actor_loss sft_loss",
    ),
    **_names("loss", "total_loss train_total_loss running_loss", rank=1),
    **_names(
        "grad_norm",
        "grad_norm gradient_norm global_grad_norm total_grad_norm optim_total_grad_norm gnorm norm"
        " train_grad_norm actor_grad_norm l2_norm_grad_global train_l2_norm_grad_global gradnorm"
        " grad_l2_norm raw_grad_norm global_norm grad",
    ),
    **_names(
        "step_s",
        "step_time_s step_time step_s step_time_sec iter_time iter_time_s iteration_time"
        " iteration_time_s time_per_step time_per_iter sec_per_step s_per_step seconds_per_step"
        " seconds sec_per_iter train_step_timing_in_s timing_s_step perf_time_per_step"
        " time_metrics_end_to_end_s elapsed_time_per_iteration_s elapsed_time_per_step dt"
        " batch_time step_duration step_duration_s train_batch_time",
    ),
    **_names(
        "step_s",
        "elapsed_time_per_iteration_ms step_time_ms iter_time_ms iteration_time_ms ms_per_step"
        " batch_time_ms step_ms step_duration_ms",
        1e-3,
    ),
    **_names("time", "time total"),
    **_names(
        "tokens_per_s",
        "tokens_per_s tokens_per_sec tokens_per_second tokens_s tok_s tok_sec tok_per_s tps"
        " throughput_tps tokens_per_second_per_gpu tokens_per_sec_per_gpu tokens_s_device"
        " tokens_per_gpu_per_second tokens_s_gpu tgs wps throughput_tokens_per_sec"
        " train_throughput_tokens_per_sec throughput_device_tokens_per_second perf_throughput"
        " tokens_per_s_per_gpu toks_per_s throughput_tokens_per_s",
    ),
    **_names(
        "tokens_per_s",
        "per_device_tps throughput_per_device_tps throughput_device_tokens_per_sec"
        " train_throughput_device_tokens_per_sec",
        rank=1,
    ),
    **_names(
        "samples_per_s",
        "samples_per_s samples_per_sec samples_per_second currsamplespersec samples_s"
        " examples_per_sec examples_per_second images_per_sec img_s throughput_samples_per_sec"
        " train_throughput_samples_per_sec it_s its_per_s steps_per_s steps_per_sec"
        " steps_per_second iters_per_sec throughput",
    ),
    **_names(
        "tflops",
        "tflops tflop_s tflops_s throughput_per_gpu_tflop_s_gpu tflops_per_gpu tflop_s_gpu"
        " tflop_s_device tflops_per_sec_per_gpu tflops_gpu model_tflops tflops_device"
        " model_tflop_s_gpu tflops_per_device",
    ),
    **_names("mfu", "mfu mfu_pct mfu_percent perf_mfu_actor mfu_actor bf16_mfu train_mfu"),
    **_names("loss_scale", "loss_scale loss_scaler grad_scale scaler_scale amp_scale"),
    **_names(
        "skipped",
        "skipped skipped_steps skipped_iters skipped_iterations num_skipped overflow_steps"
        " skipped_total overflows number_of_skipped_iterations",
    ),
    **_names("nan_steps", "nan_iters nan_iterations nan_steps number_of_nan_iterations"),
    **_names("lr", "lr learning_rate train_lr actor_lr"),
    **_names("batch", "global_batch_size"),
    **_names(
        "host_gb",
        "host_rss_gb rss_gb host_mem_gb host_memory_gb cpu_mem_gb cpu_memory_gb ram_gb ram_used_gb"
        " perf_cpu_memory_used_gb cpu_rss_gb host_rss_gib host_mem_used_gb rss rank0_rss_gb",
    ),
    **_names("host_gb", "host_rss_mb rss_mb host_mem_mb cpu_mem_mb", 1e-3),
    **_names("rank", "rank global_rank"),
    **_names("host", "host hostname node machine node_name nodename vm instance server"),
    **_names("at", "timestamp ts _timestamp wall_time datetime date"),
    **_names("attempt", "attempt run restart incarnation generation restarts restart_count"),
}
NUMBERS = frozenset(meaning.field for meaning in MEANINGS.values()) - {"host", "at"}
SPEED = ("mfu", "tflops", "tokens_per_s", "samples_per_s")
"""Fields that say how much is done per second: the first that is there counts."""
TOLD = ("loss", "grad_norm", "step_s", "skipped", *SPEED)
"""At least one of these makes a line a report of progress."""
_OTHER = re.compile(r"[^a-z0-9]+")


@lru_cache(maxsize=4096)
def meaning_of(name: str) -> Meaning | None:
    """What a printed name means; None if it is nothing that is read."""
    lower = name.lower()
    lower = lower.rsplit(" - ", 1)[-1]  # Weights & Biases: "run name - train/loss"
    flat = ("_" if lower.startswith("_") else "") + _OTHER.sub("_", lower).strip("_")
    return MEANINGS.get(flat)
