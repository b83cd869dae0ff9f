"""DPO and IPO: of a right and a wrong trajectory of one group, make the right one the likelier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch

from learners.advantages import has_variance
from learners.algorithms.options import LearnerOptions, PreferenceOptions
from learners.batches.train_batch import TrainBatch
from learners.learner import Learner
from learners.losses import dpo_loss, ipo_loss
from learners.meter import Columns, TokenLoss
from learners.models.scoring import TokenOutputs
from ragr1_actors.core.types import Trajectory


class DPOLearner(Learner):
    """Direct preference optimization (Rafailov et al., arXiv:2305.18290), on-policy.

    The best trajectory of a group and its worst are a pair, the second best and the second worst, and so on, as long as
    their rewards differ. The two need not lie in one micro-batch: before every step the policy scores its minibatch,
    and what is trained is the log-prob of every token times the slope of the loss at the pair's margin, which has the
    same gradient. That is one forward pass more a step. Of the ``training`` section, what clips, corrects and adds to a
    policy gradient is not used: ``clip_low``, ``clip_high``, ``tis_clip``, ``kl_coeff`` and ``entropy_coeff``.
    """

    options_class: ClassVar[type[LearnerOptions]] = PreferenceOptions
    options: PreferenceOptions

    @property
    def uses_old_logprobs(self) -> bool:
        """The loss compares with the reference alone."""
        return False

    def select_members(self, members: list[Trajectory]) -> list[Trajectory]:
        """Return the pairs of a group one after another, the right trajectory of each first."""
        ranked = sorted(members, key=lambda member: (-member.reward, member.trajectory_id))
        pairs = zip(ranked, reversed(ranked), strict=True)
        chosen = [pair for pair in list(pairs)[: len(ranked) // 2] if has_variance([m.reward for m in pair])]
        return [member for pair in chosen for member in pair]

    def compute_advantages(self, batch: TrainBatch) -> Columns:
        """Ask the reference."""
        return {"ref_logprobs": self.reference_logprobs(batch.flat)}

    def minibatches(self, batch: TrainBatch, rng: np.random.Generator) -> Iterator[list[int]]:
        """Keep pairs together."""
        order = rng.permutation(len(batch.trajectories) // 2)
        for part in np.array_split(order, self.schedule.num_minibatches):
            if len(part):
                yield [index for pair in part.tolist() for index in (2 * pair, 2 * pair + 1)]

    def step_columns(self, batch: TrainBatch, indices: list[int]) -> Columns:
        """Loss and slope of every pair of the minibatch, such that the mean over all tokens is the mean over pairs."""
        lengths_N = torch.tensor(batch.flat.model_lengths)
        owners_M = torch.arange(len(lengths_N)).repeat_interleave(lengths_N)
        logprobs_M = self.score(lambda micro_batch: self.policy(micro_batch).logprobs, batch.flat, indices)
        gains_M = (logprobs_M - batch.columns["ref_logprobs"]).double()
        gains_N = torch.zeros(len(lengths_N), dtype=torch.float64).index_add_(0, owners_M, gains_M)
        margins_P = (gains_N[0::2] - gains_N[1::2]).requires_grad_()
        losses_P = self.pair_losses(margins_P)
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
        return {name: column_N.float()[owners_M] for name, column_N in columns_N.items()}

    def pair_losses(self, margins_P: torch.Tensor) -> torch.Tensor:
        """Return the loss of every pair."""
        return dpo_loss(margins_P, self.options.beta)

    def compute_loss(self, outputs: TokenOutputs, columns: Columns) -> TokenLoss:
        """The value of the pair's loss, and its gradient."""
        steps = columns["slopes"] * (outputs.logprobs - outputs.logprobs.detach())
        margin, share = columns["margin"], columns["share"]  # with its share, a mean over tokens is one over pairs
        metrics = {"margin": margin * share, "pair_accuracy": (margin > 0) * share}
        return TokenLoss(columns["pair_loss"] + steps, metrics)


class IPOLearner(DPOLearner):
    """Identity preference optimization (Azar et al., arXiv:2310.12036): the margin is drawn to a finite value."""

    def pair_losses(self, margins_P: torch.Tensor) -> torch.Tensor:
        """Return the loss of every pair."""
        return ipo_loss(margins_P, self.options.beta)
