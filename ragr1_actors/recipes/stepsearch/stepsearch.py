"""StepSearch's rewards (arXiv:2505.15107): each search earns the evidence that it adds, less what was found before.

Of n gold passages, with the hits of search turn t::

    gain_t       = 1/n * sum_i max(0, c_i_t - m_i_(t-1))    c_i_t: how near the best hit is to gold passage i, in [0, 1]
                                                            m_i_t: the best of all turns up to t
    redundancy_t = share of the hits that an earlier turn had found
    turn t earns   gain_t - redundancy_t
    the last turn  F1 of the answer + KEY * mean over the gold queries of the best token F1 of any query with it

Here c is 1 for the gold passage itself and 0 for others; the paper has a similarity of texts. The published code
(43215ba) has KEY = 0.618, 0.6 of what the turns earn, and -1 for the last turn without an answer at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from envs.measures import token_f1
from ragr1_actors import RewardContext, RewardResult, Task, ToolCall, Trajectory
from ragr1_actors.recipes.worlds.evidence import evidence_in, recall

KEY = 0.5
"""Weight of the queries' match beside the F1 of the answer."""


def key_match(task: Task, queries: Sequence[str]) -> float:
    """Return the mean over the gold queries of the best token F1: 1.0 if each was asked; 0 without.

    They are ``search_keys`` of a task file, wordings of each query, of which one counts; else the names of the plan.
    """
    gold = task.meta.get("search_keys") or [(name,) for asked in task.plan for name in asked]
    best = (max((token_f1(query, tuple(wordings)) for query in queries), default=0.0) for wordings in gold)
    return sum(best) / len(gold) if gold else 0.0


def search_reward(calls: Sequence[ToolCall], task: Task, known: set[str], seen: set[str]) -> float:
    """Return ``gain - redundancy`` of a turn, and add what it found to ``known`` (evidence) and ``seen`` (passages)."""
    hits = [record for call in calls for record in call.records]
    found = evidence_in(task, hits)
    gain = len(found - known) / max(1, len(task.supporting_ids))
    redundancy = sum(hit.id in seen for hit in hits) / len(hits) if hits else 0.0
    known |= found
    seen |= {hit.id for hit in hits}
    return gain - redundancy


async def stepwise(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    """Return the reward above, of which each turn has what it earned."""
    task, known, seen = trajectory.task, set[str](), set[str]()
    steps = [search_reward(turn.calls, task, known, seen) for turn in trajectory.turns]
    f1 = token_f1(trajectory.answer, task.golden_answers)
    key = key_match(task, [call.asked for call in trajectory.calls])
    if steps:
        steps[-1] += f1 + KEY * key
    return RewardResult(sum(steps), tuple(steps), {"f1": f1, "key": key, "evidence": recall(trajectory)})
