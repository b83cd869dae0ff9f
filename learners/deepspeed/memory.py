"""Bytes of one learner rank, computed from the model's shape and the settings. Imports no torch.

::

    resting     weights, master weights, moments, gradient buffers: there between two updates
    a phase     what is there while the policy steps, the critic steps, or the reference scores
    peak        the largest phase

Formulas follow DeepSpeed 0.19's ZeRO (Rajbhandari et al., arXiv:1910.02054) as ``deepspeed_engine.py`` sets it up, and
the activations that transformers' decoder layers save; ``tests/test_learners_memory.py`` compares with real models.

Notation: P parameters, N ranks, e bytes per element, T tokens of a row, C hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ragr1_actors.core.config import LearnerSettings, RunConfig
from ragr1_actors.core.models.model_shape import ModelShape
from ragr1_actors.core.resolve import has_reference
from ragr1_actors.core.section import Checkpointing

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
HEAD_CHUNK = 2**26
"""Number of logits per chunk of ``models/scoring_head.py``: 256 MiB in fp32."""
BUCKET_ELEMENTS = 200_000_000
"""Limit of the elements in DeepSpeed's reduction bucket; see ``_deepspeed_config``."""
_MAX_LIVE_ELEMENTS = 1_000_000_000
"""Default of DeepSpeed's ``stage3_max_live_parameters``: limit of gathered elements at the same time."""
CUDA_CONTEXT_BYTES = 2 * 2**30
"""Bytes of CUDA context, cuBLAS and NCCL buffers of one process; an allowance, not a measurement."""

Parts = Mapping[str, int]
"""Bytes by content: ``{"policy weights": 3_807_808_256, ...}``."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank."""

    resting: Parts
    """Bytes on the device between two updates."""
    phases: Mapping[str, Parts]
    """Bytes on the device in addition to ``resting``, by phase of the update."""
    host: Parts
    """Bytes in the host's memory: the largest amount that is offloaded."""

    @property
    def peak_phase(self) -> str:
        """Phase with the most bytes."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak_bytes(self) -> int:
        """Bytes on the device at the peak."""
        return sum(self.resting.values()) + sum(self.phases[self.peak_phase].values())


@dataclass(frozen=True)
class EngineState:
    """Bytes of a ``DeepSpeedEngine`` on one rank."""

    resting: Parts
    """Bytes on the device between two steps, all of which ``offload_states`` frees."""
    step: Parts
    """Bytes in addition to ``resting``, from the first backward pass of a step to its end."""
    host: Parts


def engine_state(num_parameters: int, num_trained: int, settings: LearnerSettings, element_bytes: int) -> EngineState:
    """Return the bytes of one rank for a model with ``num_trained`` of its ``num_parameters`` trained.

    Stage 0 keeps no master weights; stages 1 and 2 keep the rank's share of them in fp32 even if the model is fp32;
    stage 3 shards the weights too, and keeps gradient sums and the reduction bucket between steps.
    """
    stage = max(2, settings.stage) if element_bytes == 2 else settings.stage
    num_ranks = max(1, settings.num_learners)
    share = 4 * num_trained // num_ranks
    weights = element_bytes * num_parameters
    bucket = element_bytes * min(num_trained, BUCKET_ELEMENTS)
    if stage == 0:
        return EngineState({"weights": weights, "moments": 8 * num_trained}, {"gradients": 4 * num_trained}, {})
    resting = {"weights": weights, "master weights": share, "moments": 2 * share}
    step = {"gradients": share, "reduction bucket": bucket}
    if stage == 1:
        step["gradients"] = element_bytes * num_trained
    if stage == 3:
        gathered = element_bytes * min(num_parameters, _MAX_LIVE_ELEMENTS)
        resting |= {"weights": weights // num_ranks, "gradients": share, "reduction bucket": bucket}
        step = {"gathered weights": gathered}
    host: dict[str, int] = {}
    if "optimizer" in settings.offload:
        host |= {name: resting.pop(name) for name in ("master weights", "moments")}
        host["gradients"] = (resting if stage == 3 else step).pop("gradients")
    if "params" in settings.offload and stage == 3:
        host["weights"] = resting.pop("weights")
    return EngineState(resting, step, host)


def layer_bytes_per_token(shape: ModelShape, element_bytes: int, *, repeats_keys: bool) -> int:
    """Return the bytes of activations that one decoder layer saves per token for its backward pass.

    Two RMS norms save their input in fp32, its normalised form and their output; attention saves queries, keys, values,
    its output and a log-sum per head; the gated MLP saves four tensors of width I. ``repeats_keys`` is block attention
    with gradient checkpointing: it repeats keys and values for every query head, for one layer at a time.
    """
    e = element_bytes
    norms = shape.hidden_size * 2 * (4 + 2 * e) + 8
    keys = shape.attention_size if repeats_keys else shape.kv_size
    attention = 2 * e * (shape.attention_size + keys) + 4 * shape.num_heads
    if shape.has_qk_norm:
        attention += (4 + e) * (shape.attention_size + shape.kv_size) + 4 * (shape.num_heads + shape.num_kv_heads)
    return norms + attention + 4 * e * shape.intermediate_size


def activation_bytes(
    shape: ModelShape, num_tokens: int, element_bytes: int, *, checkpointing: Checkpointing, takes_rows: bool
) -> int:
    """Return the peak of the activations of one forward and backward pass over a row of ``num_tokens``.

    ``takes_rows`` is flash attention, which does not repeat keys and values. With gradient checkpointing a layer keeps
    its input only, or with the selective one also what products and attention return, and one layer at a time is
    computed again. The embedding and the last norm keep ``(4 + 2.5 e) C`` per token; the backward pass needs two
    tensors of width I, or 9 e C in the last norm.
    """
    e, recomputed = element_bytes, 0
    if checkpointing:
        recomputed = recomputed_bytes(shape, num_tokens, e, checkpointing=checkpointing, takes_rows=takes_rows)
        products = selected_bytes_per_token(shape, e) if checkpointing == "selective" else 0
        kept = shape.num_layers * (e * shape.hidden_size + products)
    else:
        kept = shape.num_layers * layer_bytes_per_token(shape, e, repeats_keys=False) + _work_per_token(shape, e)
    return recomputed + num_tokens * (kept + (8 + 5 * e) * shape.hidden_size // 2)


def selected_bytes_per_token(shape: ModelShape, element_bytes: int) -> int:
    """Return the bytes per token that selective checkpointing keeps of a layer beside its input.

    Products return queries, keys, values, two tensors of width I and two of width C; attention returns its output and
    a log-sum per head.
    """
    widths = 2 * (shape.attention_size + shape.kv_size + shape.intermediate_size + shape.hidden_size)
    return element_bytes * widths + 4 * shape.num_heads


def recomputed_bytes(
    shape: ModelShape, num_tokens: int, element_bytes: int, *, checkpointing: Checkpointing, takes_rows: bool
) -> int:
    """Return the part of ``activation_bytes`` of the one layer that gradient checkpointing computes again."""
    layer = layer_bytes_per_token(shape, element_bytes, repeats_keys=not takes_rows)
    if checkpointing == "selective":  # these are kept, and saved once
        layer -= element_bytes * (shape.attention_size + 2 * shape.intermediate_size) + 4 * shape.num_heads
    return num_tokens * (layer + _work_per_token(shape, element_bytes))


def _work_per_token(shape: ModelShape, element_bytes: int) -> int:
    return max(2 * element_bytes * shape.intermediate_size, 9 * element_bytes * shape.hidden_size)


def head_bytes(shape: ModelShape, num_targets: int, element_bytes: int) -> int:
    """Return the peak of ``ScoringHead``: logits of a chunk twice in fp32, and the gradients of logits and weight.

    The weight's gradient is summed in fp32, and copied to the dtype of the weight after the last chunk.
    """
    chunk = min(HEAD_CHUNK, num_targets * shape.vocab_size) * (8 + element_bytes)
    copy = element_bytes * shape.embedding_parameters if element_bytes < 4 else 0
    return 4 * shape.embedding_parameters + max(chunk, copy)


def pass_parts(
    shape: ModelShape,
    num_tokens: int,
    num_targets: int,
    element_bytes: int,
    *,
    checkpointing: Checkpointing,
    takes_rows: bool,
) -> Parts:
    """Return the peak of a policy's forward and backward pass over a row.

    The head has its gradient before the first layer is computed again, so the two share memory. The vision tower counts
    as if all tokens were of different images, which is the most.
    """
    head, shared = head_bytes(shape, num_targets, element_bytes), 0
    if checkpointing:
        shared = recomputed_bytes(shape, num_tokens, element_bytes, checkpointing=checkpointing, takes_rows=takes_rows)
    activations = activation_bytes(shape, num_tokens, element_bytes, checkpointing=checkpointing, takes_rows=takes_rows)
    parts = {"activations": activations, "head": max(0, head - shared)}
    if (tower := shape.vision) is not None:  # its layers attend without block attention
        parts["vision tower"] = activation_bytes(
            tower.layers,
            tower.patches_per_token * num_tokens,
            element_bytes,
            checkpointing=checkpointing,
            takes_rows=True,
        )
    return parts


def lora_parameters(shape: ModelShape, rank: int, target_modules: list[str]) -> int:
    """Return the parameters of low-rank adapters: rank x (inputs + outputs) of every linear layer."""
    c, i, a, k = shape.hidden_size, shape.intermediate_size, shape.attention_size, shape.kv_size
    widths = {"q_proj": c + a, "k_proj": c + k, "v_proj": c + k, "o_proj": a + c}
    widths |= {"gate_proj": c + i, "up_proj": c + i, "down_proj": i + c}
    return shape.num_layers * rank * sum(widths.get(name, 0) for name in target_modules)


def trained_parameters(shape: ModelShape, config: RunConfig, *, has_critic: bool) -> dict[str, int]:
    """Return the parameters that each engine trains; a checkpoint has 12 bytes of each: weight and moments in fp32."""
    lora = config.learners.lora
    if lora is not None:
        policy = backbone = lora_parameters(shape, lora.rank, lora.target_modules)
    else:
        policy, backbone = shape.num_parameters, shape.backbone_parameters
    return {"policy": policy, **({"critic": backbone + shape.hidden_size + 1} if has_critic else {})}


def kept_parts(parts: Parts) -> Parts:
    """Return the parts of ``resting`` that are copied to the host's memory; gradients are dropped."""
    return {name: size for name, size in parts.items() if name.endswith(("weights", "moments"))}


def _tokens_of_a_step(config: RunConfig) -> int:
    """Return the largest number of tokens of one rank in one optimizer step, which no row exceeds."""
    training, num_ranks = config.training, max(1, config.learners.num_learners)
    num_trajectories = training.train_batch_size * training.group_size
    return -(-num_trajectories // (training.num_minibatches * num_ranks)) * config.env_runners.max_context_tokens


def rank_memory(shape: ModelShape, config: RunConfig, *, has_critic: bool, on_gpu: bool = True) -> RankMemory:
    """Return the bytes of one learner rank in RL; ``has_critic`` for PPO."""
    settings, e = config.learners, ELEMENT_BYTES[config.policy.dtype]
    lora = settings.lora
    adapters = lora_parameters(shape, lora.rank, lora.target_modules) if lora is not None else 0
    trained = trained_parameters(shape, config, has_critic=has_critic)
    longest = config.env_runners.max_context_tokens
    tokens = max(longest, min(settings.row_tokens, _tokens_of_a_step(config)))
    takes_rows = on_gpu and e == 2
    passes = pass_parts(shape, tokens, tokens, e, checkpointing=settings.gradient_checkpointing, takes_rows=takes_rows)
    activations = passes["activations"]
    policy = engine_state(shape.num_parameters + adapters, trained["policy"], settings, e)
    resting = {f"policy {name}": size for name, size in policy.resting.items()}
    if on_gpu:
        resting["CUDA context"] = CUDA_CONTEXT_BYTES
    host = {f"policy {name}": size for name, size in policy.host.items()}
    phases: dict[str, Parts] = {"policy step": {**policy.step, **passes}}
    if has_reference(config) and lora is None:
        share = max(1, settings.num_learners) if settings.stage == 3 else 1
        weights = e * shape.num_parameters // share
        forward = {"activations": activations // 2}
        if settings.gradient_checkpointing:  # it keeps no layer
            forward["activations"] = activation_bytes(shape, tokens, e, checkpointing=True, takes_rows=takes_rows)
        forward["head"] = 8 * min(HEAD_CHUNK, tokens * shape.vocab_size)
        if settings.stage == 3:
            forward["gathered weights"] = e * min(shape.num_parameters, _MAX_LIVE_ELEMENTS)
        rests = "reference" in settings.offload
        phases["reference pass"] = {**forward, **({"reference weights": weights} if rests else {})}
        (host if rests else resting)["reference weights"] = weights
    if has_critic:
        num_parameters = shape.backbone_parameters + shape.hidden_size + 1 + adapters
        critic = engine_state(num_parameters, trained["critic"], settings, e)
        held = {f"critic {name}": size for name, size in critic.resting.items()}
        rests = "critic" in settings.offload
        phases["critic step"] = {**critic.step, "activations": activations, **(held if rests else {})}
        if rests:
            host |= kept_parts(held)
        else:
            resting |= held
        host |= {f"critic {name}": size for name, size in critic.host.items()}
    return RankMemory(resting, phases, host)
