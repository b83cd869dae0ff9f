"""Options of the policy gradients on the quickstart: ``python -m benchmarks.learner.ablations [FOLDER]``.

For each of three seeds, SFT once, and from its policy RL with every variant: turn credit and outcome reward without a
lag, then ``training.max_policy_lag`` 1, 2 and 4 without a correction, with ``tis_clip`` and with each kind of
``sequence_correction`` at its default bounds. These are 3 runs of SFT and 60 of RL, some minutes each, in
``runs/ablations`` or FOLDER. A run that ended is read, not repeated, so the command goes on where it was interrupted.

Prints a Markdown table. EM is of the evaluation after RL, mean and values of the seeds. The others are means over the
iterations of RL and the seeds: the distance of the learner's log-probs from the engine's in nats, of all tokens and of
those that the newest version sampled, and the share of trajectories that were masked or truncated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.measurement import run_script
from benchmarks.real.runs import FinishedRun, train
from ragr1_actors.runs.telemetry.metrics import is_iteration, read_metrics

ROOT = Path("runs/ablations")
RECIPE = "quickstart"
SEEDS = (0, 1, 2)
CORRECTIONS: dict[str, list[str]] = {
    "none": [],
    "tis_clip": ["training.options.tis_clip=2"],
    **{
        kind: [f"training.options={{sequence_correction: {{kind: {kind}}}}}"]
        for kind in ("truncate", "mask", "geometric_mask", "reject")
    },
}
VARIANTS: dict[tuple[int, str], list[str]] = {
    (0, "none"): [],
    (0, "turn_credit"): ["training.options={turn_credit: {}, drop_zero_variance: true}"],
    **{
        (lag, name): [f"training.max_policy_lag={lag}", *overrides]
        for lag in (1, 2, 4)
        for name, overrides in CORRECTIONS.items()
    },
}
"""Overrides by lag and name."""
HEADING = "| lag | variant | EM | of the seeds | gap | gap, newest version | outside |\n|---|---|---|---|---|---|---|"


def main(root: Path = ROOT, seeds: Sequence[int] = SEEDS) -> None:
    """Train what has not ended, then print the table; seed by seed, so that an early end leaves whole comparisons."""
    found: dict[tuple[int, str], list[FinishedRun]] = {variant: [] for variant in VARIANTS}
    for seed in seeds:
        sft = train(RECIPE, "sft", ["training.num_iterations=0"], seed, root)
        for (lag, name), overrides in VARIANTS.items():
            found[lag, name].append(train(RECIPE, f"lag{lag}_{name}", [*from_sft(sft.path), *overrides], seed, root))
    print(table(found))


def from_sft(run: Path) -> list[str]:
    """Overrides for RL from the policy that SFT left in a run directory."""
    return [f"policy.model={run / 'policy_sft'}", "policy.options={}", "sft.num_steps=0"]


def table(found: Mapping[tuple[int, str], Sequence[FinishedRun]]) -> str:
    """Return the Markdown table of the runs by lag and variant."""
    return "\n".join([HEADING, *(_row(lag, name, runs) for (lag, name), runs in found.items())])


def _row(lag: int, name: str, runs: Sequence[FinishedRun]) -> str:
    scores = [run.evaluated("rl", "em") for run in runs]
    metrics = ("learner/logprob_gap_mean", "learner/logprob_gap_mean_fresh", "learner/sequences_outside")
    means = [_mean(runs, metric) for metric in metrics]
    shown = ["" if mean is None else f"{mean:.4f}" for mean in means]
    each = ", ".join(f"{score:.3f}" for score in scores)
    return f"| {lag} | `{name}` | {fmean(scores):.3f} | {each} | {' | '.join(shown)} |"


def _mean(runs: Sequence[FinishedRun], metric: str) -> float | None:
    """The mean over the iterations of RL that have the metric; None if none has it."""
    rows = [row for run in runs for row in read_metrics(run.path) if is_iteration(row)]
    values = [row[metric] for row in rows if metric in row]
    return fmean(values) if values else None


if __name__ == "__main__":
    run_script(main, root="?")
