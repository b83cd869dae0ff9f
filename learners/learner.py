"""The base of every learning algorithm: from groups of trajectories to optimizer steps.

::

    update(groups)                                   the same groups on every rank
      │  select_members  failures out, groups without signal out
      │  prepare, compute_advantages  ──► columns    one entry a MODEL token, the same on every rank
      │  decouple                                    with training.tis_clip and several steps: score the batch first
      └► for every epoch and minibatch               seeded permutation of trajectories
           │  step_columns ──► columns               what depends on the minibatch
           │  plan ──► this rank's packed micro-batches
           │  for every micro-batch: policy(row) ──► compute_loss(outputs, columns) ──► backward
           └► step                                   skipped where the gradient is not finite

An algorithm overrides ``compute_advantages`` and ``compute_loss``. Losses are per token: the base takes their mean over
all the MODEL tokens of the optimizer step, whatever the micro-batches and ranks. Another mean is a column of weights. A
trajectory is never split over micro-batches, so that a loss may take sums over one.

Notation: M MODEL tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from learners.algorithms.options import LearnerOptions, parse_options
from learners.batches.packing import FlatTrajectories, MicroBatch, pack, plan
from learners.batches.train_batch import TrainBatch, check_columns, check_loss, select
from learners.deepspeed.deepspeed_engine import DeepSpeedEngine, State, init_distributed, shared_loading
from learners.deepspeed.lr_schedule import Schedule
from learners.deepspeed.zero import AdamWSettings
from learners.meter import Columns, Meter, TokenLoss, poisoned
from learners.models.attention import takes_rows
from learners.models.export import gather, policy_shapes, policy_weights
from learners.models.policy_folder import PolicyCopy
from learners.models.reference import Reference, make_reference
from learners.models.scoring import PolicyModel, TokenOutputs, ValueModel, pair_cost
from ragr1_actors.core.config import RunConfig, read_lora
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.types import Trajectory, TrajectoryGroup
from ragr1_actors.core.weight_transport import BASE_KEY, MERGING_ENGINES, AdapterBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Learner(ABC):
    """One rank of a learner. All ranks make the same calls with the same arguments."""

    options_class: ClassVar[type[LearnerOptions]] = LearnerOptions
    """What ``training.options`` may hold."""

    def __init__(self, config: RunConfig, policy_dir: Path, rank: int = 0, world_size: int = 1) -> None:
        """Remember what to build: the policy in ``policy_dir``, as rank ``rank`` of ``world_size``."""
        self.config = config
        self.policy_dir = Path(policy_dir)
        self.policy_name = str(policy_dir)
        """What others find the policy by, where that is the name on a hub of which ``policy_dir`` is a copy here."""
        self.rank = rank
        self.world_size = world_size
        self.dtype = DTYPES[config.policy.dtype]
        self.options = self.make_options()
        self.schedule = self.make_schedule()
        self.num_updates = 0
        self.lora = read_lora(config.learners.lora)
        self._sends_adapters = self.lora is not None and config.env_runners.engine in MERGING_ENGINES
        self._reference: Reference | None = None

    # What an algorithm overrides

    def make_options(self) -> LearnerOptions:
        """Return the options of this algorithm."""
        training = self.config.training
        return parse_options(self.options_class, training.options, training.algorithm)

    def make_schedule(self) -> Schedule:
        """Return learning rate, epochs and minibatches; by default those of the ``training`` section."""
        training = self.config.training
        steps = training.num_iterations * training.num_epochs * training.num_minibatches
        return Schedule(
            lr=training.lr,
            warmup_steps=training.warmup_steps,
            num_steps=steps if training.lr_schedule == "cosine" else 0,
            num_epochs=training.num_epochs,
            num_minibatches=training.num_minibatches,
            adamw=AdamWSettings(weight_decay=training.weight_decay, grad_clip=training.grad_clip),
        )

    @property
    def temperature(self) -> float:
        """What logits are divided by: the sampling temperature, under which the rollout's log-probs were taken."""
        return self.config.env_runners.temperature

    @property
    def has_engine_logprobs(self) -> bool:
        """Whether an engine sampled the tokens, so that its log-probs can be compared with."""
        return True

    @property
    def uses_old_logprobs(self) -> bool:
        """Whether the loss compares with the policy that sampled."""
        return self.has_engine_logprobs

    @property
    def _corrects_sampling(self) -> bool:
        return self.uses_old_logprobs and self.config.training.tis_clip > 0

    @property
    def _sampled_from_a_nucleus(self) -> bool:
        """Whether the engine's log-probs are of the renormalised nucleus, and so no measure for the learner's."""
        return self.uses_old_logprobs and self.config.env_runners.top_p < 1

    def select_members(self, members: list[Trajectory]) -> list[Trajectory]:
        """Return those of a group's trajectories that carry a gradient; no failures are among ``members``."""
        return members

    def prepare(self, batch: TrainBatch) -> Columns:
        """Return columns that ``compute_advantages`` may read, and that neither it nor the minibatch matters to."""
        return {}

    @abstractmethod
    def compute_advantages(self, batch: TrainBatch) -> Columns:
        """Return the columns that ``compute_loss`` needs, each ``[M]`` of the whole batch; the same on every rank."""

    def minibatches(self, batch: TrainBatch, rng: np.random.Generator) -> Iterator[list[int]]:
        """Yield the trajectories of every optimizer step of one epoch."""
        order = rng.permutation(len(batch.trajectories))
        yield from (part.tolist() for part in np.array_split(order, self.schedule.num_minibatches) if len(part))

    def step_columns(self, batch: TrainBatch, indices: list[int]) -> Columns:
        """Return columns of the optimizer step on the trajectories ``indices``, each ``[M]`` of the whole batch."""
        return {}

    @abstractmethod
    def compute_loss(self, outputs: TokenOutputs, columns: Columns) -> TokenLoss:
        """Return the loss of every MODEL token of one micro-batch, not averaged."""

    # Building

    def build(self) -> None:
        """Load the policy and set DeepSpeed up."""
        self.device = init_distributed(self.rank, self.world_size)
        with self.loading():
            policy = self._load_policy(self.config.learners.gradient_checkpointing)
        self.pair_cost = pair_cost(policy.model)
        self.policy = self.make_engine(policy, self.schedule.adamw)

    def make_engine(
        self, module: PolicyModel | ValueModel, settings: AdamWSettings, *, rests: bool = False
    ) -> DeepSpeedEngine:
        """Wrap a module that this learner trains, or its adapters. One that rests is away outside ``in_use``."""
        if self.lora is not None:
            from learners.models.lora import add_adapters  # imports peft, 1-2 s

            add_adapters(module.pretrained, self.lora, self.config.debugging.seed)
        return DeepSpeedEngine(module, settings, self.config.learners, self.device, rests=rests)

    def loading(self) -> AbstractContextManager[None]:
        """Load what is trained in here; see ``shared_loading``."""
        learners = self.config.learners
        return shared_loading(learners.zero_stage, self.dtype, on_host="params" in learners.offload)

    def _load_policy(self, gradient_checkpointing: bool = False) -> PolicyModel:
        return PolicyModel(self.policy_dir, self.dtype, self.temperature, gradient_checkpointing)

    # Learning

    def update(self, groups: list[TrajectoryGroup]) -> dict[str, float]:
        """Learn from a batch and return metrics over all ranks. Every rank is given the whole batch."""
        batch = self._select(groups)
        meter = Meter()
        steps_an_update = self.schedule.num_epochs * self.schedule.num_minibatches
        if batch is not None:
            if self._sampled_from_a_nucleus or (self._corrects_sampling and steps_an_update > 1):
                self._decouple(batch, meter)
            batch.columns.update(self.prepare(batch))
            batch.columns.update(check_columns(self.compute_advantages(batch), batch, type(self).__name__))
            rng = np.random.default_rng((self.config.debugging.seed, self.num_updates))
            for _ in range(self.schedule.num_epochs):
                for indices in self.minibatches(batch, rng):
                    self._train_minibatch(batch, indices, meter)
        self.num_updates += 1
        num_trajectories = sum(len(group.trajectories) for group in groups)
        kept = len(batch.trajectories) if batch is not None else 0
        return {
            "num_steps": float(meter.num_steps),
            "trajectories": float(num_trajectories),
            "trajectories_left_out": float(num_trajectories - kept),
            "lr": self.schedule.lr_at(self.num_updates * steps_an_update - 1),
            **meter.reduce(self.device),
        }

    def _select(self, groups: Sequence[TrajectoryGroup]) -> TrainBatch | None:
        """Leave out what carries no gradient, before anything is computed."""
        return select(groups, self.select_members, self.has_engine_logprobs)

    def _decouple(self, batch: TrainBatch, meter: Meter) -> None:
        """Make the learner's own log-probs the old ones, and keep the engine's for the weights of the correction.

        The gap between the two is measured on the whole batch, since the pass is paid for. An update of one step needs
        no such pass: what its only pass says is what the learner says before the update.
        """
        proximal_M = self.score(lambda micro_batch: self.policy(micro_batch).logprobs, batch.flat)
        engine_M = batch.columns["old_logprobs"]
        batch.columns.update(old_logprobs=proximal_M, engine_logprobs=engine_M)
        if self.rank == 0:  # every rank has all of it, and the meter adds the ranks up
            meter.add_gap(proximal_M, engine_M, batch.columns.get("is_fresh"))

    def _train_minibatch(self, batch: TrainBatch, indices: list[int], meter: Meter) -> None:
        micro_batches = self._share(batch.flat, indices)
        model_lengths = batch.flat.model_lengths
        num_tokens = sum(model_lengths[index] for index in indices)
        meter.add_layout(micro_batches, in_blocks=not takes_rows(self.device, self.dtype))
        self.train_step(micro_batches, batch.columns | self.step_columns(batch, indices), num_tokens, meter)
        meter.num_steps += 1

    def train_step(self, micro_batches: list[MicroBatch], columns: Columns, num_tokens: int, meter: Meter) -> None:
        """Take one optimizer step; ``num_tokens`` MODEL tokens are in the micro-batches of all ranks together."""
        for micro_batch in micro_batches:
            outputs = self.policy(micro_batch)
            chosen = {name: column[micro_batch.columns].to(self.device) for name, column in columns.items()}
            if micro_batch.weight and self._shows_gap(columns, meter):
                meter.add_gap(outputs.logprobs, chosen["old_logprobs"], chosen.get("is_fresh"))
            if self._corrects_sampling and "engine_logprobs" not in columns:  # an update of one step
                chosen |= {"engine_logprobs": chosen["old_logprobs"], "old_logprobs": outputs.logprobs.detach()}
            token_loss = check_loss(self.compute_loss(outputs, chosen), outputs, type(self).__name__)
            loss = token_loss.loss.sum() * (micro_batch.weight / num_tokens)
            # DeepSpeed averages gradients over ranks; the mean here is over all tokens, so undo it.
            self.policy.backward(poisoned(loss, outputs.logprobs) * self.world_size)
            meter.add_tokens(micro_batch, outputs, chosen.get("old_logprobs"), token_loss)
        meter.add_step(grad_norm=self.policy.step(self.schedule.lr_at(self.step_index(meter))))

    @staticmethod
    def _shows_gap(columns: Columns, meter: Meter) -> bool:
        """Whether a pass shows the gap between engine and learner: after a step it would show the step's part as well.

        So it is measured on the first minibatch, which is the whole batch where an update is one step; ``_decouple``
        has measured it already.
        """
        return meter.num_steps == 0 and "old_logprobs" in columns and "engine_logprobs" not in columns

    def step_index(self, meter: Meter) -> int:
        """Optimizer steps before this one; skipped ones count, so that a schedule depends on the iteration alone."""
        return self.num_updates * self.schedule.num_epochs * self.schedule.num_minibatches + meter.num_steps

    def _share(self, flat: FlatTrajectories, indices: Sequence[int]) -> list[MicroBatch]:
        """This rank's micro-batches of some trajectories."""
        shares = plan(flat.lengths, indices, self.world_size, self.config.learners.micro_batch_tokens, self.pair_cost)
        return [pack(flat, share).to(self.device) for share in shares[self.rank]]

    def score(
        self,
        forward: Callable[[MicroBatch], torch.Tensor],
        flat: FlatTrajectories,
        indices: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run a model over the batch without gradients, shared among ranks; return ``[M]`` on every rank.

        With ``indices``, over these trajectories alone; the tokens of the others have 0.
        """
        scores = torch.zeros(len(flat.model_positions), device=self.device)
        with torch.no_grad():
            for micro_batch in self._share(flat, range(len(flat.lengths)) if indices is None else indices):
                values = forward(micro_batch).float()
                if micro_batch.weight:
                    scores[micro_batch.columns] = values
        if self.world_size > 1:
            dist.all_reduce(scores)
        return scores.cpu()

    def reference_logprobs(self, flat: FlatTrajectories) -> torch.Tensor:
        """Log-probs of the MODEL tokens under the policy that this learner was built from, ``[M]``."""
        if self._reference is None:
            self._reference = make_reference(self.policy, self._load_policy, self.device, self.config.learners)
        with self._reference.in_use():
            return self.score(self._reference.logprobs, flat)

    def offload_states(self) -> int:
        """Move what is trained to the host's memory; return the bytes freed. ``learners.offload`` moves a reference."""
        return sum(engine.offload_states() for engine in self.engines().values())

    def reload_states(self) -> None:
        """Undo ``offload_states``. What needs an engine does so for itself; done here, it is one wait."""
        for engine in self.engines().values():
            engine.reload_states()

    # State and weights

    def engines(self) -> dict[str, DeepSpeedEngine]:
        """Return everything that is trained, by name."""
        return {"policy": self.policy}

    def get_weights(self) -> State:
        """Return the policy's weights by their Hugging Face names, whole, on rank 0; nothing on the other ranks.

        A tied ``lm_head.weight`` is there as well: an engine that packs its weights does not follow the tie. bfloat16
        comes as float32, since numpy has no bfloat16.
        """
        return gather(policy_weights(self.policy, self.lora), self.rank, self.is_tied)

    def published_weights(self) -> State:
        """Return what ``stream_weights`` yields, in the form of ``get_weights``; of adapters, the base as well."""
        weights = gather(self.stream_weights(), self.rank, self.is_tied)
        return weights | ({BASE_KEY: np.asarray(self.adapter_base)} if self.adapter_base else {})

    def stream_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what runners are sent, parameter by parameter, whole, where it is and as it is, a tied one once.

        All ranks iterate to the end together. With ``learners.lora``, ``MERGING_ENGINES`` are sent adapters alone.
        """
        return policy_weights(self.policy, self.lora, adapters_only=self._sends_adapters)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what ``stream_weights`` yields, in its order; all are of ``self.dtype``."""
        return policy_shapes(self.policy, self.lora, adapters_only=self._sends_adapters)

    @property
    def adapter_base(self) -> str:
        """An ``AdapterBase`` as JSON, where runners are sent adapters alone; empty where they are sent weights."""
        if self.lora is None or not self._sends_adapters:
            return ""
        return AdapterBase(folder=self.policy_name, scaling=self.lora.alpha / self.lora.rank).model_dump_json()

    @property
    def is_tied(self) -> bool:
        """Whether ``lm_head.weight`` is ``model.embed_tokens.weight``."""
        model: Any = self.policy.module.get_submodule("model")
        return bool(model.config.tie_word_embeddings)

    def get_state(self, *, keep: bool = True) -> State:
        """Return all that a resumed run needs beside the folder it was built from. All ranks call together.

        Args:
            keep: False helps the others to gather it, and keeps next to nothing.
        """
        state: State = {"num_updates": np.asarray(self.num_updates, dtype=np.int64)}
        for name, engine in self.engines().items():
            with engine.in_use():
                state |= {f"{name}/{key}": value for key, value in engine.get_state(keep=keep).items()}
        return state

    def set_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from ``get_state`` of any number of ranks and any ZeRO stage.

        Build from the folder that the stage started from, not from a later policy: it is the reference of the KL terms.

        Raises:
            DataError: it is the state of another model, or not whole.
        """
        if "num_updates" not in state:
            raise DataError("the learner's state has no num_updates")
        self.num_updates = int(state["num_updates"])
        for name, engine in self.engines().items():
            prefix = f"{name}/"
            with engine.in_use():
                engine.set_state({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})

    def take_policy(self) -> PolicyCopy:
        """Copy the policy into rank 0's memory, to be written while learning goes on. All ranks call together."""
        weights = self.get_weights()
        tensors = {
            name: torch.from_numpy(weight).to(self.dtype).contiguous()
            for name, weight in weights.items()
            if not (self.is_tied and name == "lm_head.weight")
        }
        adapter = None
        if self.lora is not None:
            from learners.models.lora import AdapterCopy

            found = gather(policy_weights(self.policy, self.lora, adapters_only=True), self.rank, is_tied=False)
            adapter = AdapterCopy(self.lora, self.policy_name, {k: torch.from_numpy(v) for k, v in found.items()})
        return PolicyCopy(self.policy_dir, self.config.policy.dtype, tensors, adapter)

    def save_policy(self, directory: str | Path) -> None:
        """Write the policy as a Hugging Face folder, tokenizer included. All ranks call; rank 0 writes."""
        copy = self.take_policy()
        if self.rank == 0:
            copy.write(Path(directory))

    def close(self) -> None:
        """Let go of the engines."""
        for engine in self.engines().values():
            engine.close()
        if self._reference is not None:
            self._reference.close()
