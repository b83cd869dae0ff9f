"""Measures: numbers of a trajectory that has ended, which iterations and evaluations average, by name.

``TextEnv.measures`` adds others, or replaces one that has the same name here::

    class Ranking(TextEnv):
        measures = {"ndcg": ndcg}            # metrics rollout/ndcg and eval/ndcg; checkpointing.best_metric: ndcg
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ragr1_actors.core.answers import normalize_answer
from ragr1_actors.core.types import ToolCall, Trajectory
from retrieval.base import RETRIEVE, SEARCH

Measure = Callable[[Trajectory], float]
_WHOLE_ANSWERS = {"yes", "no", "noanswer"}


def exact_match(answer: str, golden_answers: Sequence[str]) -> float:
    """Return 1.0 if there is an answer that, normalised, equals a normalised gold answer, else 0.0."""
    prediction = normalize_answer(answer)
    return float(bool(answer.strip()) and any(prediction == normalize_answer(gold) for gold in golden_answers))


def token_f1(answer: str, golden_answers: Sequence[str], normalize: Callable[[str], str] = normalize_answer) -> float:
    """Return the F1 of HotpotQA's official script in [0, 1], for the closest gold answer.

    It is SQuAD's harmonic mean of token precision and recall, but an answer or gold answer yes, no or noanswer counts
    only if both are equal: "yes no" gets nothing for "yes". An answer without tokens ("The The", "A") gets 0.
    ``normalize`` is SQuAD's, or another paper's.
    """
    prediction = normalize(answer)
    return max((_f1(prediction, normalize(gold)) for gold in golden_answers), default=0.0)


def _f1(prediction: str, gold: str) -> float:
    if prediction != gold and {prediction, gold} & _WHOLE_ANSWERS:
        return 0.0
    tokens, gold_tokens = prediction.split(), gold.split()
    common = sum((Counter(tokens) & Counter(gold_tokens)).values())
    if not common:
        return 0.0
    # 2 * common / (sum of lengths) is the same number up to the last digit, but figures are compared with the script's
    precision, recall = common / len(tokens), common / len(gold_tokens)
    return (2 * precision * recall) / (precision + recall)


def searches(calls: Sequence[ToolCall]) -> list[ToolCall]:
    """Return the calls of a turn that searched.

    Where an agent searches at the gateway for the policy's call ``search``, the agent's calls are returned.
    """
    return [call for call in calls if call.tool == RETRIEVE] or [call for call in calls if call.tool == SEARCH]


def num_rounds(trajectory: Trajectory) -> float:
    """Return the number of turns whose searches ran (RAG-R1's retrieval count); the last turn's do not run."""
    return float(sum(bool(searches(turn.calls)) for turn in trajectory.turns))


def num_queries(trajectory: Trajectory) -> float:
    """Return the number of queries executed over all rounds."""
    return float(sum(len(searches(turn.calls)) for turn in trajectory.turns))


def num_repeated_queries(trajectory: Trajectory) -> float:
    """Return the number of executed queries that an earlier turn had asked already, compared without case."""
    asked = [call.asked.casefold() for turn in trajectory.turns for call in searches(turn.calls)]
    return float(len(asked) - len(set(asked)))


MEASURES: Mapping[str, Measure] = {
    "em": lambda trajectory: exact_match(trajectory.answer, trajectory.task.golden_answers),
    "f1": lambda trajectory: token_f1(trajectory.answer, trajectory.task.golden_answers),
    "rounds": num_rounds,
    "queries": num_queries,
    "repeated_queries": num_repeated_queries,
}
"""The measures that every environment has, by name."""
RATIOS = {"queries_per_round": ("queries", "rounds"), "repeat_query_rate": ("repeated_queries", "queries")}
"""Metrics that divide the mean of one measure by the mean of another."""
