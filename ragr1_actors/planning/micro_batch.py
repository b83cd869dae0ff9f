"""Token budget of a micro-batch if ``learners.micro_batch_tokens`` is not set: the largest row that fits."""

from __future__ import annotations

from pathlib import Path

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.planning.gpus import reserved_gpus
from ragr1_actors.planning.plan import Machine, count_passages, learner_fits, this_machine

SIZES = (16384, 8192, 4096, 2048, 1024)
"""Candidates in tokens. Larger rows are not faster: the matrices are large enough from about 4,096 tokens on."""


def fit_micro_batch(config: RunConfig, run_dir: Path) -> RunConfig:
    """Return ``choose_micro_batch`` for this machine, or ``config`` itself if there is no choice.

    There is no choice on a cluster, or if the sizes of a model are unknown, which ``check_room`` reports.
    """
    machine = this_machine(run_dir)
    if config.learners.micro_batch_tokens is not None or reserved_gpus(config) > machine.num_gpus:
        return config
    try:
        return choose_micro_batch(config, machine, count_passages(config))
    except ConfigError:
        return config


def choose_micro_batch(config: RunConfig, machine: Machine, num_passages: int) -> RunConfig:
    """Return the configuration with ``learners.micro_batch_tokens`` set: the largest of ``SIZES`` that fits.

    A row shorter than the longest trajectory saves nothing, since that one gets a row alone. If nothing fits, the
    smallest is taken, and the plan reports which memory is too small.

    Raises:
        ConfigError: the sizes of the policy or of the encoder are not known.
    """
    if config.learners.micro_batch_tokens is not None:
        return config
    longest = config.env_runners.max_context_tokens
    sizes = sorted({max(size, longest) for size in SIZES}, reverse=True)
    tried = [_with_tokens(config, size) for size in sizes]
    return next((one for one in tried if learner_fits(one, machine, num_passages)), tried[-1])


def _with_tokens(config: RunConfig, tokens: int) -> RunConfig:
    learners = config.learners.model_copy(update={"micro_batch_tokens": tokens})
    return config.model_copy(update={"learners": learners})
