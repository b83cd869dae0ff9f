"""The modules that DeepSpeed wraps: a policy that returns log-probs, and a critic that returns values.

Both take a packed row. Only the hidden states that predict a MODEL token go through the language-model head, a
``ScoringHead``: no tensor of all tokens by the whole vocabulary exists.

Notation: T tokens of the row, M MODEL tokens of its sequences, P predictions of the row, C hidden size. MODEL tokens
that sequences share at their beginning are predicted once, so P is at most M.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers.utils import logging

from learners.deepspeed.deepspeed_engine import num_elements
from learners.models.attention import PACKED_ATTENTION
from learners.models.scoring_head import ScoringHead
from learners.packing import MicroBatch
from ragr1_actors.core.errors import ConfigError, DataError, one_line
from ragr1_actors.core.models.huggingface import AutoModelForCausalLM, AutoModelForImageTextToText
from ragr1_actors.core.models.model_code import check_code
from ragr1_actors.core.models.model_files import ADVICE, LOAD_ERRORS, check_files
from ragr1_actors.core.models.process_memory import limit_kernel_caches
from ragr1_actors.core.models.vision import reads_images
from ragr1_actors.core.models.vision_inputs import VisionInputs

_CHANGED_LOGITS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "logits_mup_width_multiplier")
"""Names in configurations of what a model does to its logits that is not one factor, or not one that is known here."""


class TokenOutputs(NamedTuple):
    """Scores of a policy per MODEL token, in float32."""

    logprobs: torch.Tensor  # [M], log-prob of the sampled token, in nats
    entropy: torch.Tensor  # [M], entropy of the distribution over the vocabulary, in nats


class PolicyModel(nn.Module):
    """A causal language model that scores the MODEL tokens of a packed row."""

    def __init__(
        self,
        policy_dir: Path,
        dtype: torch.dtype,
        temperature: float,
        gradient_checkpointing: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        """Load a Hugging Face folder; logits are divided by ``temperature``, the sampling temperature."""
        super().__init__()
        self.model = load_causal_lm(policy_dir, dtype, gradient_checkpointing, trust_remote_code)
        self.model.set_output_embeddings(ScoringHead(self.model.get_output_embeddings()))
        self._vision = VisionInputs(self.model, policy_dir) if reads_images(policy_dir) else None
        self.temperature = temperature / logit_factor(self.model.config.get_text_config())

    def forward(self, batch: MicroBatch) -> TokenOutputs:
        """Score the MODEL tokens of a packed row."""
        hidden_TC = packed_hidden_states(self.model.get_decoder(), batch, self._vision)
        hidden_PC = hidden_TC.index_select(0, batch.predict_positions)
        outputs = self.model.get_output_embeddings()(hidden_PC, batch.target_ids, self.temperature)
        return TokenOutputs(*(batch.per_model_token(values_P) for values_P in outputs))


class ValueModel(nn.Module):
    """Backbone of the policy with a scalar head: the expected return before every MODEL token."""

    def __init__(
        self, policy_dir: Path, dtype: torch.dtype, gradient_checkpointing: bool, trust_remote_code: bool = False
    ) -> None:
        """Load the backbone of a Hugging Face folder; the head is zero, so every value starts at 0."""
        super().__init__()
        model = load_causal_lm(policy_dir, dtype, gradient_checkpointing, trust_remote_code)
        sees = reads_images(policy_dir)
        self.backbone = model.base_model if sees else model.get_decoder()  # with the vision tower, which is trained too
        self._vision = VisionInputs(self.backbone, policy_dir) if sees else None
        self.head = nn.Linear(model.get_decoder().config.hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return the values, ``[M]`` of float32."""
        decoder = self.backbone if self._vision is None else self.backbone.get_decoder()
        hidden_TC = packed_hidden_states(decoder, batch, self._vision)
        values_P: torch.Tensor = self.head(hidden_TC.index_select(0, batch.predict_positions)).squeeze(-1).float()
        return batch.per_model_token(values_P)


def load_causal_lm(
    policy_dir: Path, dtype: torch.dtype, gradient_checkpointing: bool = False, trust_remote_code: bool = False
) -> Any:
    """Load a Hugging Face folder with packed attention and without dropout.

    The tokens were sampled without dropout; with dropout the policy ratios would be noise.

    Raises:
        ConfigError: the model changes its logits after the head, takes no attention function, or brings code that is
            not trusted.
        DataError: a file is damaged.
    """
    check_code(policy_dir, trusted=trust_remote_code)
    check_files(policy_dir, weights=True)
    limit_kernel_caches()
    show_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would show one bar per rank, for a local file
    try:
        sees = reads_images(policy_dir)
        loader: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        # patches attend to each other in both directions, image by image
        attention = {"text_config": PACKED_ATTENTION, "vision_config": "sdpa"} if sees else PACKED_ATTENTION
        model = loader.from_pretrained(
            policy_dir, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    except KeyError as error:  # the model looks attention up in another table
        if error.args != (PACKED_ATTENTION,):
            raise
        raise ConfigError(
            f"policy.model: {policy_dir} does not use transformers' attention interface, which the learner needs; take "
            "another model"
        ) from error
    except (*LOAD_ERRORS, StrictDataclassError) as error:
        raise DataError(f"cannot load a model from {policy_dir}: {one_line(error, 200)}; {ADVICE}") from error
    finally:
        if show_progress:
            logging.enable_progress_bar()
    _check_supported(policy_dir, model.config.get_text_config().to_dict())
    model.eval()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers checkpoints in training mode only
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model


def _check_supported(policy_dir: Path, text_config: dict[str, Any]) -> None:
    for name in _CHANGED_LOGITS:
        if text_config.get(name) not in (None, 1, 1.0):
            raise ConfigError(
                f"policy.model: {policy_dir} changes its logits by {name}={text_config[name]}, which the learner does "
                "not support; take a model without it"
            )
    if "chunked_attention" in (text_config.get("layer_types") or ()):
        raise ConfigError(
            f"policy.model: {policy_dir} has chunked_attention, which the learner lacks; take a model without it"
        )


def logit_factor(config: Any) -> float:
    """Return the number by which a model multiplies what its head returns: 1 / 16 for Command R, 1 / 8 for Granite."""
    values = config.to_dict()
    factor = float((values.get("logit_scale") or 1.0) * (values.get("lm_head_multiplier") or 1.0))
    width = int(config.hidden_size)
    factor *= (values.get("dim_model_base") or width) / width  # MiniCPM divides hidden states
    scaling = float(values.get("logits_scaling") or 1.0)
    return factor * scaling if config.model_type == "hyperclovax" else factor / scaling  # the others divide


def packed_hidden_states(backbone: nn.Module, batch: MicroBatch, vision: VisionInputs | None = None) -> torch.Tensor:
    """Run the backbone over a packed row and return ``[T, C]``; ``vision`` makes the inputs of one that has images.

    Kernels of recurrent layers and convolutions take the sequences of the row as ``cu_seq_lens_q`` or ``seq_idx``.
    """
    token_ids = batch.token_ids.unsqueeze(0)
    rope_ids = batch.position_ids if batch.rope_ids is None else batch.rope_ids
    layout, numbers = batch.layout, None
    if layout.shared is None:
        lengths = layout.boundaries.diff()
        numbers = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
        numbers = numbers.repeat_interleave(lengths, output_size=batch.num_tokens).unsqueeze(0)
    output = backbone(
        **({"input_ids": token_ids} if vision is None else vision(token_ids, batch.images, runs_always=True)),
        position_ids=rope_ids.unsqueeze(-2),
        use_cache=False,
        packing=layout.for_one_pass(),
        cu_seq_lens_q=layout.boundaries if layout.shared is None else None,
        seq_idx=numbers,
    )
    hidden_TC: torch.Tensor = output.last_hidden_state[0]
    return hidden_TC


def pair_cost(model: Any) -> float:
    """Return the cost of a query-key pair, in tokens: a sequence of L tokens costs ``L + pair_cost * L**2``.

    It counts FLOPs (Chowdhery et al., arXiv:2204.02311, appendix B, with half the pairs for causal attention): 2 per
    parameter and token in the linear layers, 2 * num_layers * hidden_size per pair of L**2 in attention. For
    Qwen2.5-1.5B it is 1 / 30,500: at 8,000 tokens attention costs a quarter of the linear layers. The head is left out:
    it scores MODEL tokens only.
    """
    num_parameters = num_elements(model.get_decoder().parameters())
    num_parameters -= num_elements(model.get_input_embeddings().parameters())
    config = model.config.get_text_config()
    return float(config.num_hidden_layers * config.hidden_size / num_parameters)
