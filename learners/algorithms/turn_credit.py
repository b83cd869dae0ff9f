"""Credit per turn: the advantage of a turn over the other turns of its group that began in the same state.

After GiGPO (Feng et al., Group-in-Group Policy Optimization, arXiv:2505.10978): the advantage of a token is the
advantage of its trajectory, plus a weight times the advantage of its turn. Turns of one group that begin in the same
state are compared by their discounted returns.

Deviations: a state is the set of record ids that the attempt has found so far, or without calls the text of the last
observation. GiGPO takes the observation of its environments, and the authors' run with searches takes similar texts
(verl-agent, ``examples/gigpo_trainer/run_search.sh``: similarity of .9). A turn without another one in its state has
the advantage 0, also for algorithms whose trajectories keep their reward without a group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from ragr1_actors.core.types import Trajectory

Compare = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function that returns advantages from values and group numbers, ``[T]`` each; see ``learners/advantages.py``."""


def turn_advantages(
    trajectories: Sequence[Trajectory],
    group_ids: Sequence[int],
    rewards_N: torch.Tensor,
    gamma: float,
    compare: Compare,
) -> torch.Tensor:
    """Return the advantage of every turn of a batch, ``[T]`` of float64, one trajectory after another.

    ``rewards_N`` are the rewards by which trajectories are compared, ``[N]``: the last turn gets what exceeds the sum
    of the turns' rewards. ``group_ids`` is ``[N]``.
    """
    returns: list[float] = []
    numbers: dict[Hashable, int] = {}
    states: list[int] = []
    for trajectory, group_id, reward in zip(trajectories, group_ids, rewards_N.tolist(), strict=True):
        returns += discounted_returns(trajectory.turn_rewards, reward, gamma)
        states += [numbers.setdefault((group_id, state), len(numbers)) for state in states_before(trajectory)]
    returns_T, states_T = torch.tensor(returns, dtype=torch.float64), torch.tensor(states)
    is_alone_T = states_T.bincount()[states_T] == 1 if states else torch.zeros(0, dtype=torch.bool)
    return compare(returns_T, states_T).masked_fill(is_alone_T, 0.0)


def discounted_returns(turn_rewards: Sequence[float], reward: float, gamma: float) -> list[float]:
    """Return ``sum of gamma ** (j - k) * r_j`` over the turns ``j`` from ``k`` on, for every turn ``k``.

    ``discounted_returns([0.0, 0.0], 1.0, 0.5) == [0.5, 1.0]``: the last turn gets the rest of the trajectory's reward.
    """
    rewards, running = list(turn_rewards), 0.0
    if rewards:
        rewards[-1] += reward - sum(turn_rewards)
    found: list[float] = []
    for of_turn in reversed(rewards):
        running = of_turn + gamma * running
        found.append(running)
    return found[::-1]


def states_before(trajectory: Trajectory) -> list[Hashable]:
    """Return the state in which each turn begins."""
    found: list[Hashable] = []
    known: frozenset[str] = frozenset()
    seen = ""
    for turn in trajectory.turns:
        found.append(known or seen)
        known |= {record.id for call in turn.calls for record in call.records}
        seen = turn.observation
    return found
