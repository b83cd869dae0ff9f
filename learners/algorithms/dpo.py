"""DPO and IPO: given a better and a worse trajectory of one group, make the better one more likely."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch

from learners.learner import Learner
from learners.losses import TokenLoss, dpo_loss, ipo_loss
from learners.models.scoring import TokenOutputs
from learners.options import LearnerOptions, PreferenceOptions, has_variance
from learners.train_batch import TokenColumns, TrainBatch
from ragr1_actors.core.types import Trajectory


class DPOLearner(Learner):
    """Direct preference optimization (Rafailov et al., arXiv:2305.18290), on-policy.

    The best and the worst trajectory of a group form a pair, then the second best and the second worst, and so on while
    their rewards differ. The two may be in different micro-batches: before every step the policy scores its minibatch,
    and the step trains the log-prob of every token times the slope of the loss at the pair's margin, which has the same
    gradient. This costs one more forward pass per step. The settings of the ``training`` section that change a policy
    gradient are not used: ``kl_coeff`` and ``entropy_coeff``.

    Its columns, ``[M]`` each: ``ref_logprobs`` and, per step, ``pair_loss``, ``slopes``, ``margin`` and ``share``.
    """

    options_class: ClassVar[type[LearnerOptions]] = PreferenceOptions
    options: PreferenceOptions
    uses_old_logprobs: ClassVar[bool] = False  # the loss compares with the reference only
    pair_losses = staticmethod(dpo_loss)
    """Function for the loss per pair, ``[P]``, from the margins, ``[P]``, and ``beta``."""

    def select_members(self, members: list[Trajectory]) -> list[Trajectory]:
        """Return the pairs of a group one after another, the better trajectory of each pair first."""
        ranked = sorted(members, key=lambda member: (-member.reward, member.trajectory_id))
        pairs = zip(ranked, reversed(ranked), strict=True)
        chosen = [pair for pair in list(pairs)[: len(ranked) // 2] if has_variance([m.reward for m in pair])]
        return [member for pair in chosen for member in pair]

    def compute_advantages(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Score the batch under the reference and return ``ref_logprobs``."""
        return {"ref_logprobs": self.reference_logprobs(batch.flat)}

    def minibatches(self, batch: TrainBatch, rng: np.random.Generator) -> Iterator[list[int]]:
        """Yield minibatches in which the two trajectories of a pair are together."""
        order = rng.permutation(len(batch.trajectories) // 2)
        for part in np.array_split(order, self.schedule.num_minibatches):
            if len(part):
                yield [index for pair in part.tolist() for index in (2 * pair, 2 * pair + 1)]

    def step_columns(self, batch: TrainBatch, indices: list[int]) -> dict[str, torch.Tensor]:
        """Return loss and slope of each pair of the minibatch, scaled so that the mean over tokens is over pairs."""
        lengths_N = batch.model_lengths
        logprobs_M = self.score(self.policy_logprobs, batch.flat, indices)
        gains_N = batch.per_trajectory(logprobs_M - batch.columns["ref_logprobs"])
        margins_P = (gains_N[0::2] - gains_N[1::2]).requires_grad_()
        losses_P = self.pair_losses(margins_P, self.options.beta)
        (slopes_P,) = torch.autograd.grad(losses_P.sum(), margins_P)
        scale = lengths_N[indices].sum() / (len(indices) // 2)
        pair_lengths_P = lengths_N[0::2] + lengths_N[1::2]
        values_P = scale * losses_P.detach() / pair_lengths_P
        columns_N = {
            "pair_loss": values_P.repeat_interleave(2),
            "slopes": torch.stack((scale * slopes_P, -scale * slopes_P), dim=1).flatten(),
            "margin": margins_P.detach().repeat_interleave(2),
            "share": (scale / pair_lengths_P).repeat_interleave(2),
        }
        return {name: batch.per_token(column_N) for name, column_N in columns_N.items()}

    def compute_loss(self, outputs: TokenOutputs, columns: TokenColumns) -> TokenLoss:
        """Return the value of the pair's loss, with its gradient by the log-probs."""
        steps = columns["slopes"] * (outputs.logprobs - outputs.logprobs.detach())
        margin, share = columns["margin"], columns["share"]  # the factor makes a mean over tokens one over pairs
        metrics = {"margin": margin * share, "pair_accuracy": (margin > 0) * share}
        return TokenLoss(columns["pair_loss"] + steps, metrics)


class IPOLearner(DPOLearner):
    """Identity preference optimization (Azar et al., arXiv:2310.12036): the margin approaches a finite value."""

    pair_losses = staticmethod(ipo_loss)
