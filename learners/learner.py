"""Base of every learning algorithm: from trajectory groups to optimizer steps.

::

    update(groups)                                    every learner rank gets the same groups
      │  make_batch ──► TrainBatch                    without failures and groups without a gradient
      │  fill_columns ──► TokenColumns                old_logprobs, prepare, compute_advantages; same on every rank
      └► per epoch and minibatch                      seeded permutation of trajectories
           │  step_columns ──► TokenColumns           columns that depend on the minibatch
           │  plan ──► packed micro-batches of this rank
           │  per micro-batch: policy(row) ──► compute_loss(outputs, columns) ──► backward
           └► step                                    skipped if the gradient is not finite

An algorithm overrides ``compute_advantages`` and ``compute_loss``. Losses are per token: the base takes their mean over
all MODEL tokens of the optimizer step, over micro-batches and ranks. ``loss_weights`` give another mean. All tokens of
a sequence are in one micro-batch, so a loss may sum over a sequence: a trajectory, or a row of it.

Notation: M MODEL tokens.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from learners.deepspeed.deepspeed_engine import (
    DeepSpeedEngine,
    FrozenModule,
    Schedule,
    State,
    WholeTensor,
    init_distributed,
    shared_loading,
)
from learners.losses import TokenLoss, propagate_not_finite
from learners.models.export import PolicyCopy, copy_arrays, copy_tensors, policy_tensors
from learners.models.scoring import PolicyModel, TokenOutputs, check_rows, pair_cost, takes_rows
from learners.options import LearnerOptions, read_options
from learners.packing import MODEL_ONLY, FlatTrajectories, MicroBatch, assign_micro_batches, bundle, pack
from learners.train_batch import Meter, TokenColumns, TrainBatch, check_shape, learned_columns, make_batch
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.disk.learner_state import TensorPart, Tensors
from ragr1_actors.core.errors import ConfigError, DataError
from ragr1_actors.core.models.process_memory import trim_heap
from ragr1_actors.core.section import Checkpointing
from ragr1_actors.core.types import TokenKind, Trajectory, TrajectoryGroup
from ragr1_actors.core.weight_transport import BASE_KEY, RECEIVING_ENGINES, AdapterBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
logger = logging.getLogger(__name__)


class Learner(ABC):
    """Learner rank. All ranks make the same calls with the same arguments."""

    options_class: ClassVar[type[LearnerOptions]] = LearnerOptions
    """Class of the legal keys of ``training.options``."""
    has_rollout_logprobs: ClassVar[bool] = True
    """Whether an engine sampled the tokens, so that the batch has ``rollout_logprobs``."""
    trained_kinds: ClassVar[frozenset[TokenKind]] = MODEL_ONLY
    """Kinds of tokens that are trained, by default the policy's. A class may add ``TokenKind.INJECTED``, tokens that
    code wrote into its turns: the learner's log-probs at the start of the update replace the engine's for them."""
    uses_old_logprobs: ClassVar[bool] = True
    """Whether the loss compares with the policy that sampled, if an engine sampled."""

    def __init__(self, config: RunConfig, policy_dir: Path, rank: int = 0, world_size: int = 1) -> None:
        """Store what ``build`` needs: the folder of the policy, and this rank's number out of ``world_size``."""
        self.config = config
        self.policy_dir = Path(policy_dir)
        self.policy_name = str(policy_dir)
        """Name of the policy for other processes: ``policy_dir``, or the name on a hub of which it is a local copy."""
        self.policy_reference = ""
        """Value of ``Folder.reference``; empty for a path or a name on a hub."""
        self.rank = rank
        self.world_size = world_size
        self.dtype = DTYPES[config.policy.dtype]
        self.options = self.make_options()
        self.schedule = self.make_schedule()
        self.lr_factor = 1.0
        """Factor of the learning rate, set by ``scale_lr``."""
        self.num_updates = 0
        self.num_micro_batches = 0
        """Number of micro-batches trained and scored; another thread of ``LearnerGroup`` reads it as progress."""
        self.learned: pa.RecordBatch | None = None
        """Values per token of the newest update, in ``LEARNED_SCHEMA``; on rank 0, if trajectories are kept."""
        self.row_tokens = config.learners.row_tokens
        """Token budget of a row; a longer sequence gets a row alone, and with 1 every sequence does."""
        self.shares_tokens = True
        """Whether a row holds the common beginning of its sequences once."""
        self.lora = config.learners.lora
        self._sends_adapters = self.lora is not None and config.env_runners.engine in RECEIVING_ENGINES
        self._reference: FrozenModule | None = None
        self._has_gap = False  # whether this update measured the gap between engine and learner

    # -- Methods that an algorithm overrides --------------------------------------------------------------------------

    def make_options(self) -> LearnerOptions:
        """Return the options of this algorithm."""
        return read_options(self.options_class, self.config.training)

    def make_schedule(self) -> Schedule:
        """Return learning rate, epochs and minibatches; the default takes the ``training`` section."""
        training = self.config.training
        steps = training.num_iterations * training.num_epochs * training.num_minibatches
        return Schedule(
            lr=training.lr,
            warmup_steps=training.warmup_steps,
            num_steps=steps if training.lr_schedule == "cosine" else 0,
            num_epochs=training.num_epochs,
            num_minibatches=training.num_minibatches,
            weight_decay=training.weight_decay,
            grad_clip=training.grad_clip,
        )

    def scale_lr(self, factor: float) -> None:
        """Set the factor of the configuration's learning rate; the learner's state keeps it."""
        self.lr_factor = factor
        schedule = self.make_schedule()
        self.schedule = replace(schedule, lr=factor * schedule.lr)

    @property
    def temperature(self) -> float:
        """Divisor of logits: the sampling temperature, under which the rollout log-probs were computed."""
        return self.config.env_runners.temperature

    def connect(self, groups: Sequence[TrajectoryGroup]) -> Sequence[TrajectoryGroup]:
        """Return the groups of a batch, changed or without some; RLlib's learner connector.

        Every rank returns the same for the same groups.
        """
        return groups

    def select_members(self, members: list[Trajectory]) -> list[Trajectory]:
        """Return the trajectories of a group that have a gradient; ``members`` contains no failures."""
        return members

    def prepare(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Return columns that ``compute_advantages`` may read, by name, ``[M]`` each."""
        return {}

    @abstractmethod
    def compute_advantages(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Return the columns that ``compute_loss`` needs, by name: ``{"advantages": tensor of [M]}``.

        Names are fields of ``TokenColumns`` or new ones. Every rank returns the same values for the whole batch.
        """

    def minibatches(self, batch: TrainBatch, rng: np.random.Generator) -> Iterator[list[int]]:
        """Yield the indices of the trajectories of every optimizer step of one epoch."""
        order = rng.permutation(len(batch.trajectories))
        yield from (part.tolist() for part in np.array_split(order, self.schedule.num_minibatches) if len(part))

    def step_columns(self, batch: TrainBatch, indices: list[int]) -> dict[str, torch.Tensor]:
        """Return columns of the optimizer step on the trajectories ``indices``, ``[M]`` each for the whole batch."""
        return {}

    @abstractmethod
    def compute_loss(self, outputs: TokenOutputs, columns: TokenColumns) -> TokenLoss:
        """Return the loss per MODEL token of one micro-batch, not averaged."""

    # Building

    def build(self) -> None:
        """Load the policy and create its DeepSpeed engine. All ranks call together."""
        self.device = init_distributed(self.rank, self.world_size, self.config.learners.num_gpus_per_learner)
        with self.loading("params"):
            policy = self._load_policy(self.config.learners.gradient_checkpointing)
        self.pair_cost = pair_cost(policy.model)
        self.policy = self.make_engine(policy, policy.model)
        self._check_rows(policy.model)

    def _check_rows(self, model: Any) -> None:
        """Put every sequence into a separate row if a layer of the policy mixes the sequences of a row."""
        layer, self.shares_tokens = check_rows(
            self.policy_logprobs,
            model.get_decoder(),
            model.get_input_embeddings().num_embeddings,
            self.dtype,
            self.device,
            self.config.env_runners.max_context_tokens,
        )
        if layer:
            self.row_tokens = 1
        if layer and self.rank == 0:
            logger.warning(
                "policy.model: %s mixes the sequences of a packed row; the learner takes one sequence per row, which "
                "is correct and slower",
                layer,
            )

    def make_engine(self, module: nn.Module, pretrained: nn.Module, *, rests: bool = False) -> DeepSpeedEngine:
        """Return the engine of a module; with ``learners.lora`` adapters replace the weights of ``pretrained`` in it.

        ``rests`` is the argument of ``DeepSpeedEngine``.
        """
        if self.lora is not None:
            from learners.models.lora import add_adapters  # imports peft, 1-2 s

            add_adapters(pretrained, self.lora, self.config.debugging.seed)
        return DeepSpeedEngine(module, self.schedule, self.config.learners, self.device, rests=rests)

    def loading(self, part: Literal["params", "reference"]) -> AbstractContextManager[None]:
        """Return the context in which a module is loaded, as ``learners.offload`` says; see ``shared_loading``."""
        learners = self.config.learners
        return shared_loading(learners.stage, self.dtype, on_host=part in learners.offload)

    def _load_policy(self, gradient_checkpointing: Checkpointing = False) -> PolicyModel:
        trusted = self.config.policy.trust_remote_code
        return PolicyModel(self.policy_dir, self.dtype, self.temperature, gradient_checkpointing, trusted)

    # Learning

    def update(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Learn from a batch and return metrics over all ranks. Every rank gets the whole batch.

        Raises:
            LearnerError: ten optimizer steps in a row were skipped.
        """
        kept: object = self.connect(groups)
        if not isinstance(kept, Sequence) or not all(isinstance(group, TrajectoryGroup) for group in kept):
            raise ConfigError(f"{type(self).__name__}.connect returned {kept!r}, expected a list of TrajectoryGroup")
        batch = make_batch(kept, self.select_members, self.has_rollout_logprobs, self.trained_kinds)
        keeps_ratios = self.has_rollout_logprobs and self.config.checkpointing.keep_trajectories
        num_ratios = len(batch.columns.trajectory_ids) if batch is not None and keeps_ratios else 0
        meter, self.learned = Meter(num_ratios, self.device), None
        if batch is not None:
            batch = self.fill_columns(batch, meter)
            self.train(batch, meter)
            if num_ratios:
                ratios_M = meter.gather_ratios()
                self.learned = learned_columns(batch, ratios_M) if self.rank == 0 else None
        self.num_updates += 1
        num_trajectories = sum(len(group.trajectories) for group in groups)
        num_kept = len(batch.trajectories) if batch is not None else 0
        del batch, kept
        trim_heap()  # else another process cannot use the memory of the activations until the next update
        return {
            "num_steps": float(meter.num_steps),
            "trajectories": float(num_trajectories),
            "trajectories_left_out": float(num_trajectories - num_kept),
            "lr": self.schedule.lr_at(self.num_updates * self.schedule.steps_per_update - 1),
            **meter.reduce(self.device),
        }

    def train(self, batch: TrainBatch, meter: Meter) -> None:
        """Take the optimizer steps of the update."""
        for indices in self.steps(batch):
            self._train_minibatch(batch, indices, meter)

    def steps(self, batch: TrainBatch) -> Iterator[list[int]]:
        """Yield the trajectories of every optimizer step of the update; the same ones in every call."""
        rng = np.random.default_rng((self.config.debugging.seed, self.num_updates))
        for _ in range(self.schedule.num_epochs):
            yield from self.minibatches(batch, rng)

    def fill_columns(self, batch: TrainBatch, meter: Meter) -> TrainBatch:
        """Return the batch with all columns that do not depend on the minibatch. All ranks call together.

        An update of one step that corrects for the engine leaves ``old_logprobs`` to the pass of the step, which
        runs under the policy at the start of the update.
        """
        columns, corrects, own_M = batch.columns, self.corrects_sampling, None
        lacks_own = columns.is_sampled is not None or (corrects and columns.old_logprobs is not None)
        if columns.rollout_logprobs is not None and (self._scores_old_logprobs or lacks_own):
            own_M = self.score(self.policy_logprobs, batch.flat)
            if self.rank == 0:  # every rank has all values, and the meter sums over ranks
                _add_gap(meter, own_M, columns)
        self._has_gap = own_M is not None
        if columns.rollout_logprobs is not None and (self._has_gap or not corrects):
            is_denominator = corrects or self._scores_old_logprobs
            columns = columns.with_denominator(own_M, is_denominator=is_denominator, corrects=corrects)
            batch = replace(batch, columns=columns)
        name = type(self).__name__
        batch = batch.with_columns(self.prepare(batch), f"{name}.prepare")
        return batch.with_columns(self.compute_advantages(batch), f"{name}.compute_advantages")

    @property
    def corrects_sampling(self) -> bool:
        """Whether the loss weighs by the ratio of the learner's and the engine's probabilities."""
        return False

    @property
    def _scores_old_logprobs(self) -> bool:
        """Whether the update scores the batch first: to correct several steps, or because ``top_p`` is below 1.

        With ``top_p`` below 1 the engine's log-probs are of the renormalised nucleus, so they are not a denominator.
        """
        samples_nucleus = self.uses_old_logprobs and self.config.env_runners.top_p < 1
        return samples_nucleus or (self.corrects_sampling and self.schedule.steps_per_update > 1)

    def _train_minibatch(self, batch: TrainBatch, indices: list[int], meter: Meter) -> None:
        micro_batches = self.local_micro_batches(batch.flat, indices)
        num_tokens = int(batch.model_lengths[indices].sum())
        meter.add_layout(micro_batches, in_blocks=not takes_rows(self.device, self.dtype))
        batch = batch.with_columns(self.step_columns(batch, indices), f"{type(self).__name__}.step_columns")
        self.train_step(micro_batches, batch.columns, num_tokens, meter)
        meter.num_steps += 1

    def train_step(self, micro_batches: list[MicroBatch], columns: TokenColumns, num_tokens: int, meter: Meter) -> None:
        """Take one optimizer step on the ``micro_batches`` of this rank.

        ``columns`` covers the whole batch; ``num_tokens`` counts the MODEL tokens in the micro-batches of all ranks.
        """
        # The gap is measured on the first step, whose pass runs under the policy at the start of the update
        measures_gap = meter.num_steps == 0 and not self._has_gap
        for micro_batch in micro_batches:
            outputs = self.policy(micro_batch)
            chosen = columns.select(micro_batch.column_index, self.device)
            if chosen.rollout_logprobs is not None:
                if micro_batch.weight and measures_gap:
                    _add_gap(meter, outputs.logprobs, chosen)
                if chosen.old_logprobs is None:
                    chosen = replace(chosen, old_logprobs=outputs.logprobs.detach())
            if micro_batch.weight and chosen.advantages is not None:
                meter.add_advantages(outputs.logprobs, chosen.advantages)
            token_loss = self._checked(self.compute_loss(outputs, chosen), len(outputs.logprobs))
            loss = token_loss.loss.sum() * (micro_batch.weight / num_tokens)
            # DeepSpeed averages gradients over ranks; the mean here is over all tokens, so undo it.
            self.policy.backward(propagate_not_finite(loss, outputs.logprobs) * self.world_size)
            meter.add_tokens(micro_batch, outputs, chosen.old_logprobs, token_loss)
            self.num_micro_batches += 1
        meter.add_step(grad_norm=self.policy.step(self.schedule.lr_at(self.step_index(meter.num_steps))))

    def _checked(self, token_loss: TokenLoss, num_tokens: int) -> TokenLoss:
        method = f"{type(self).__name__}.compute_loss"
        if not isinstance(token_loss, TokenLoss):
            raise ConfigError(f"{method} returned {type(token_loss).__name__}, expected a learners.losses.TokenLoss")
        for name, values in {"loss": token_loss.loss, **token_loss.metrics}.items():
            check_shape(f"{method}: {name}", values, num_tokens)
        return token_loss

    def step_index(self, step: int) -> int:
        """Return the number of optimizer steps before step ``step`` of this update, skipped ones included."""
        return self.num_updates * self.schedule.steps_per_update + step

    def local_micro_batches(self, flat: FlatTrajectories, indices: Sequence[int]) -> list[MicroBatch]:
        """Return this rank's micro-batches of the trajectories ``indices``."""
        bundles = bundle(flat, flat.sequences(indices), self.world_size, self.row_tokens, shares=self.shares_tokens)
        shares = assign_micro_batches(flat.lengths, bundles, self.world_size, self.row_tokens, self.pair_cost)
        rows = (pack(flat, share, self.row_tokens, shares=self.shares_tokens) for share in shares[self.rank])
        return [row.to(self.device) for row in rows]

    def score(
        self,
        forward: Callable[[MicroBatch], torch.Tensor],
        flat: FlatTrajectories,
        indices: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run a model over the batch without gradients, shared among the ranks; return ``[M]`` on every rank.

        With ``indices``, it runs over these trajectories only; the tokens of the others get 0.
        """
        scores = torch.zeros(len(flat.model_positions), device=self.device)
        with torch.no_grad():
            for micro_batch in self.local_micro_batches(
                flat, range(len(flat.model_lengths)) if indices is None else indices
            ):
                values = forward(micro_batch).float()
                self.num_micro_batches += 1
                if micro_batch.weight:
                    scores[micro_batch.column_index] = values
        if self.world_size > 1:
            dist.all_reduce(scores)
        return scores.cpu()

    def policy_logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the policy's log-probs of the MODEL tokens of a micro-batch, ``[M]``."""
        logprobs_M: torch.Tensor = self.policy(micro_batch).logprobs
        return logprobs_M

    def reference_logprobs(self, flat: FlatTrajectories) -> torch.Tensor:
        """Return log-probs of the MODEL tokens under the policy at the start of the stage, ``[M]``.

        With ``learners.lora`` this policy is the trained one without its adapters, else a second model.
        """
        if self.lora is not None:
            from learners.models.lora import adapters_disabled

            with adapters_disabled(self.policy.module):
                return self.score(self.policy_logprobs, flat)
        if self._reference is None:
            with self.loading("reference"):
                policy = self._load_policy()
            self._reference = FrozenModule(policy, self.device, self.config.learners)
        reference = self._reference
        with reference.in_use():
            return self.score(lambda micro_batch: reference(micro_batch).logprobs, flat)

    def offload_states(self) -> int:
        """Move all trained tensors to the host's memory and return the freed bytes; a reference is not moved.

        An engine reloads them when it is used.
        """
        return sum(engine.offload_states() for engine in self.engines().values())

    # State and weights

    def engines(self) -> dict[str, DeepSpeedEngine]:
        """Return the engines of all modules that are trained, by name."""
        return {"policy": self.policy}

    def get_weights(self) -> State:
        """Return the policy's whole weights by Hugging Face name on rank 0, and an empty dict on the other ranks.

        A tied ``lm_head.weight`` is included: an engine that packs its weights does not keep the tie. bfloat16 is
        returned as float32.
        """
        return copy_arrays(policy_tensors(self.policy, self.lora), self.rank, self.is_tied)

    def published_weights(self) -> State:
        """Return ``published_tensors`` as arrays, see ``Engine.update_weights``; adapters with their base."""
        weights = copy_arrays(self.published_tensors(), self.rank, self.is_tied, self.dtype)
        return weights | ({BASE_KEY: np.asarray(self.adapter_base)} if self.adapter_base else {})

    def published_tensors(self) -> Iterator[WholeTensor]:
        """Yield the tensors for env runners in ``self.dtype``, a tied tensor once; all ranks gather in the same order.

        With ``learners.lora``, ``RECEIVING_ENGINES`` receive adapters only.
        """
        return policy_tensors(self.policy, self.lora, adapters_only=self._sends_adapters)

    @property
    def adapter_base(self) -> str:
        """``AdapterBase`` as JSON if env runners receive adapters only, else empty."""
        if self.lora is None or not self._sends_adapters:
            return ""
        scaling = self.lora.alpha / self.lora.rank
        base = AdapterBase(folder=self.policy_name, reference=self.policy_reference, scaling=scaling)
        return base.model_dump_json()

    @property
    def is_tied(self) -> bool:
        """Whether ``lm_head.weight`` is ``model.embed_tokens.weight``."""
        model: Any = self.policy.module.get_submodule("model")
        return bool(model.config.tie_word_embeddings)

    def get_parts(self) -> dict[str, TensorPart]:
        """Return this rank's part of the state that a resumed run needs besides the folder of the policy."""
        parts: dict[str, TensorPart] = {}
        if self.rank == 0:
            parts["num_updates"] = TensorPart(np.asarray([self.num_updates], dtype=np.int64), 0, ())
            parts["lr_factor"] = TensorPart(np.asarray([self.lr_factor]), 0, ())
        for name, engine in self.engines().items():
            with engine.in_use():
                parts |= {f"{name}/{key}": part for key, part in engine.get_parts().items()}
        return parts

    def get_state(self) -> State:
        """Return the parts of all ranks as whole tensors by name. All ranks call together."""
        owned = self.get_parts()
        parts: list[Any] = [owned]
        if self.world_size > 1:
            parts = [None] * self.world_size
            dist.all_gather_object(parts, owned)
        return dict(Tensors(parts))

    def set_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a state of any number of ranks and any ZeRO stage. All ranks call together.

        Build from the policy at the start of the stage, not a later one, since it is the reference of the KL terms.

        Raises:
            DataError: the state belongs to another model, or a part is missing.
        """
        if "num_updates" not in state:
            raise DataError("the learner's state has no num_updates")
        self.num_updates = int(state["num_updates"])
        self.scale_lr(float(state.get("lr_factor", 1.0)))  # checkpoints of earlier versions have none
        for name, engine in self.engines().items():
            with engine.in_use():
                engine.set_state(state, f"{name}/")

    def take_policy(self) -> PolicyCopy:
        """Copy the policy into rank 0's memory, to be written while learning continues. All ranks call together."""
        tensors = copy_tensors(policy_tensors(self.policy, self.lora), self.rank, self.dtype)
        adapter = None
        if self.lora is not None:
            from learners.models.lora import AdapterCopy

            adapters = policy_tensors(self.policy, self.lora, adapters_only=True)
            adapter = AdapterCopy(self.lora, self.policy_name, copy_tensors(adapters, self.rank, torch.float32))
        return PolicyCopy(self.policy_dir, self.config.policy.dtype, tensors, adapter)

    def save_policy(self, directory: str | Path) -> None:
        """Write the policy as a Hugging Face folder, tokenizer included. All ranks call; rank 0 writes."""
        copy = self.take_policy()
        if self.rank == 0:
            copy.write(Path(directory))

    def close(self) -> None:
        """Release the engines and the reference; the learner cannot be used afterwards."""
        for engine in self.engines().values():
            engine.close()
        if self._reference is not None:
            self._reference.close()
        self.learned = None


def _add_gap(meter: Meter, logprobs_M: torch.Tensor, columns: TokenColumns) -> None:
    """Add the gap on the tokens that an engine sampled to the meter."""
    values = [logprobs_M, columns["rollout_logprobs"], columns.is_fresh]
    if columns.is_sampled is not None:
        values = [None if value is None else value[columns.is_sampled] for value in values]
    meter.add_gap(*values)  # type: ignore[arg-type]  # the first two are no None
