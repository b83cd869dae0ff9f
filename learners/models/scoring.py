"""The modules that DeepSpeed wraps: a policy that returns log-probs, and a critic that returns values; their attention.

All take a packed row. Only the hidden states that predict a MODEL token go through the language-model head, a
``ScoringHead``: no tensor of all tokens by the whole vocabulary exists.

Attention runs over many sequences one after another without padding; no sequence attends to another. transformers calls
the function registered here once per layer. The linear layers run on the packed tokens, without padding. On a GPU in
half precision torch's ``varlen_attn`` (flash attention, arXiv:2307.08691) takes the row directly. Elsewhere the
sequences of one ``Block`` are stacked (padded to the longest of the block) for one causal
``scaled_dot_product_attention``, then unstacked::

    packed row      [ a a a a a | b b b b | c c | d d ]        T = 13
    blocks          [ ---- 0 ----------- ] [ --- 1 -- ]
    block 0         a a a a a       padding follows a sequence, where causal attention never looks
                    b b b b .

If sequences begin alike, the row holds their common tokens once (``SharedTokens``), and linear layers run once per
token. In blocks, the queries of a sequence are its own tokens in the row, and its keys are copied from the row::

    sequences       [ a b c d ] [ a b e ]
    packed row      [ a b c d e ]
    queries, keys   a b c d, a b c d;   e, a b e

Flash attention takes whole sequences: queries, too, are copied before it, and the tokens of the row are taken from its
output. A sliding window is an argument of it, and a bias of the blocks; it counts positions in a sequence, not in the
row. Attention sinks (a logit per head in the softmax's denominator, arXiv:2508.10925) need the blocks.

No tensor of size T x T exists: transformers builds no mask for an attention function without a mask function.

Notation: T tokens of the row, M MODEL tokens of its sequences, P predictions of the row, C hidden size, S sequences of
a block, L longest of a block, H heads, D head dimension. MODEL tokens that sequences share at their beginning are
predicted once, so P is at most M.

When the policy is built, a check finds out whether the sequences of a packed row affect each other in it. Packing is
exact for causal attention. Recurrent layers and convolutions carry a state from one sequence to the next, and some
rotary embeddings depend on the longest sequence of the row. No list of models is complete, so two short sequences are
scored::

    alone        [ a a a ]   [ b b b ]
    packed       [ a a a   b b b ]      b differs: a layer mixes sequences; they need a row each
    followed     [ a a a   c c c ]      a differs, with c at the last positions: no row gives the right scores
    shared       [ a a a   d ]          a a d differs: a layer takes the row in order; every sequence is whole in it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers.utils import logging

from learners.deepspeed.deepspeed_engine import num_elements
from learners.models.scoring_head import ScoringHead
from learners.packing import Block, FlatTrajectories, MicroBatch, PackedLayout, pack
from ragr1_actors.core.errors import ConfigError, DataError, LearnerError, one_line
from ragr1_actors.core.models.huggingface import AttentionInterface, AutoModelForCausalLM, AutoModelForImageTextToText
from ragr1_actors.core.models.model_files import ADVICE, LOAD_ERRORS, check_code, check_files
from ragr1_actors.core.models.process_memory import limit_kernel_caches
from ragr1_actors.core.models.vision import reads_images
from ragr1_actors.core.models.vision_inputs import VisionInputs
from ragr1_actors.core.section import Checkpointing

_CHANGED_LOGITS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "logits_mup_width_multiplier")
"""Names in configurations of what a model does to its logits that is not one factor, or not one that is known here."""

_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
]
"""Operations that selective checkpointing does not compute again (Korthikanti et al., arXiv:2205.05198, keep less)."""


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
        gradient_checkpointing: Checkpointing = False,
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
        self,
        policy_dir: Path,
        dtype: torch.dtype,
        gradient_checkpointing: Checkpointing,
        trust_remote_code: bool = False,
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
    policy_dir: Path,
    dtype: torch.dtype,
    gradient_checkpointing: Checkpointing = False,
    trust_remote_code: bool = False,
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
        selects = {"context_fn": partial(create_selective_checkpoint_contexts, _KEPT)}
        settings = {"use_reentrant": False, **(selects if gradient_checkpointing == "selective" else {})}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
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


PACKED_ATTENTION = "ragr1_packed"
"""Name of the ``attn_implementation`` with which transformers calls ``packed_attention``."""
_SINK_WIDTH = 8
"""Number of dimensions that sinks add to heads; kernels of GPUs take multiples of 8."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, H_kv, T, D]
    value: torch.Tensor,  # [1, H_kv, T, D]
    attention_mask: torch.Tensor | None,
    *,
    packing: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Apply causal attention within every sequence of the row; return ``[1, T, H, D]`` as transformers expects.

    ``sliding_window`` and ``s_aux``, the sinks, are this layer's. The model's attention dropout is ignored: the tokens
    were sampled without it.

    Raises:
        LearnerError: the model needs soft caps.
    """
    if softcap:
        raise LearnerError("policy.model: its attention has soft caps, which the learner lacks; take another model")
    assert attention_mask is None, "a packed row has no mask: the layout holds the ends of the sequences"
    parts_THD = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    window = sliding_window or None
    if s_aux is None and takes_rows(query.device, query.dtype):
        return flash_attention(*parts_THD, packing, scaling, window).unsqueeze(0), None
    # a module in training mode is computed again in the backward pass, so nothing of it is kept
    output_THD = block_attention(*parts_THD, packing, scaling, window, s_aux, keeps_small=not module.training)
    return output_THD.unsqueeze(0), None


def takes_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether flash attention takes the row directly; else attention runs on padded blocks."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def flash_attention(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,  # H_kv heads, like value_THD
    value_THD: torch.Tensor,
    packing: PackedLayout,
    scaling: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Run flash attention over the boundaries of the sequences: one kernel per layer, no padding; ``[T, H, D]``."""
    shared = packing.shared
    if shared is not None:
        query_THD, key_THD, value_THD = (
            part.index_select(0, shared.spread) for part in (query_THD, key_THD, value_THD)
        )
    output_THD: torch.Tensor = varlen_attn(  # type: ignore[assignment]  # a tuple only with other arguments
        query_THD,
        key_THD,
        value_THD,
        packing.boundaries,
        packing.boundaries,
        packing.max_len,
        packing.max_len,
        scale=scaling,
        window_size=(window - 1 if window else -1, 0),  # keys before and behind a query's; causal
        enable_gqa=key_THD.shape[1] != query_THD.shape[1],
    )
    return output_THD if shared is None else output_THD.index_select(0, shared.origin)


def block_attention(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,  # H_kv heads, like value_THD
    value_THD: torch.Tensor,
    packing: PackedLayout,
    scaling: float | None = None,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
    *,
    keeps_small: bool = True,
) -> torch.Tensor:
    """Run attention block by block, on any device and in any dtype; ``[T, H, D]``.

    A query sees the last ``window`` keys of its sequence, its own included. ``sinks_H`` are further terms of the
    softmax's denominator, as logits. With ``keeps_small`` the backward pass copies keys and values again, and repeats
    them for the heads of a group; not with sinks.
    """
    groups = query_THD.shape[1] // key_THD.shape[1]
    outputs = []
    for block in packing.blocks:
        query_SHLD = _spread(query_THD, block)
        key_SHLD, value_SHLD = (_copies(packed_THD, block, groups) for packed_THD in (key_THD, value_THD))
        copied = ((key_THD, key_SHLD), (value_THD, value_SHLD)) if groups > 1 or block.keys is not None else ()
        bias = block.bias(query_THD, window, num_sinks=sinks_H is not None)
        if sinks_H is not None:
            scaling = scaling or query_THD.shape[-1] ** -0.5
            query_SHLD, key_SHLD, value_SHLD = _with_sinks(query_SHLD, key_SHLD, value_SHLD, sinks_H / scaling)
        with _keeping(copied, block, groups) if keeps_small and copied else nullcontext():
            output_SHLD = scaled_dot_product_attention(
                query_SHLD,
                key_SHLD,
                value_SHLD,
                attn_mask=bias,
                is_causal=bias is None,
                scale=scaling,
            )
        flat = output_SHLD[..., : value_THD.shape[-1]].transpose(1, 2).flatten(0, 1)  # [S * L, H, D]
        outputs.append(flat if block.slots is None else flat.index_select(0, block.slots))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _with_sinks(
    query_SHLD: torch.Tensor, key_SHLD: torch.Tensor, value_SHLD: torch.Tensor, sinks_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append a key to every head whose product with each query is its sink, and whose value is 0.

    The product takes ``_SINK_WIDTH`` more dimensions, which are 0 in the other keys.
    """
    queries = pad(query_SHLD, (0, _SINK_WIDTH), value=1.0)
    shares_H1 = (sinks_H.to(key_SHLD.dtype) / _SINK_WIDTH)[:, None, None].expand(len(key_SHLD), -1, 1, _SINK_WIDTH)
    sink_SH1D = pad(shares_H1, (key_SHLD.shape[-1], 0))
    keys = torch.cat((pad(key_SHLD, (0, _SINK_WIDTH)), sink_SH1D), dim=2)
    return queries, keys, pad(value_SHLD, (0, _SINK_WIDTH, 0, 1))


def _keeping(copied: Sequence[tuple[torch.Tensor, torch.Tensor]], block: Block, groups: int) -> saved_tensors_hooks:
    """Return a context in which autograd saves each tensor instead of its copies, bit for bit.

    The copies are saved if a kernel saves them in another shape, as torch's plain one does.
    """
    again = {_place(copies): partial(_copies, packed_THD.detach(), block, groups) for packed_THD, copies in copied}

    def pack(tensor: torch.Tensor) -> torch.Tensor | partial[torch.Tensor]:
        return again.get(_place(tensor), tensor)

    def unpack(kept: torch.Tensor | partial[torch.Tensor]) -> torch.Tensor:
        return kept if isinstance(kept, torch.Tensor) else kept()

    return saved_tensors_hooks(pack, unpack)


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the identity of a tensor: address, shape and strides."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _copies(packed_THD: torch.Tensor, block: Block, groups: int) -> torch.Tensor:
    """Copy the keys of a block, or its values, and repeat every head ``groups`` times: ``[S, H, L, D]``."""
    if block.keys is None:
        spread_SHLD = _spread(packed_THD, block)
    else:
        tokens = packed_THD.index_select(0, block.keys)
        spread_SHLD = tokens.view(block.num_seqs, block.num_keys, *tokens.shape[1:]).transpose(1, 2)
    return spread_SHLD.repeat_interleave(groups, dim=1) if groups > 1 else spread_SHLD


def _spread(packed_THD: torch.Tensor, block: Block) -> torch.Tensor:
    """Stack the tokens of the sequences of a block from the row: ``[T, H, D]`` to ``[S, H, L, D]``."""
    tokens = packed_THD[block.start : block.stop]
    if block.slots is not None:
        padded = tokens.new_zeros(block.num_seqs * block.num_queries, *tokens.shape[1:])
        tokens = padded.index_copy(0, block.slots, tokens)
    return tokens.view(block.num_seqs, block.num_queries, *tokens.shape[1:]).transpose(1, 2)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


_LENGTH = 24
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Gap between two log-probs of one token, in nats, up to which it counts as rounding."""
_ROUNDING_FACTOR = 4.0
"""Factor by which the gap may exceed the first sequence's, which is only rounding, as nothing precedes it."""

Score = Callable[[MicroBatch], torch.Tensor]
"""Function that returns the log-probs of the MODEL tokens of a row, ``[M]``."""


def check_rows(
    score: Score, backbone: Any, vocab_size: int, dtype: torch.dtype, device: torch.device, max_length: int
) -> tuple[str, bool]:
    """Return the first layer through which sequences of a packed row reach each other, and whether a row may share.

    The layer is empty if there is none. A row that shares holds the common beginning of sequences once.
    ``max_length`` is the longest trajectory's. All ranks call together: five to seven passes of at most 48 tokens.

    Raises:
        ConfigError: the scores of a sequence depend on what follows it; the message names the layer.
    """
    rng = np.random.default_rng(0)
    first, second, other = (rng.integers(vocab_size, size=_LENGTH) for _ in range(3))
    head, tail = slice(0, _LENGTH), slice(_LENGTH, None)

    def run(*sequences: NDArray[np.int64], shift: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        row = _row(sequences)
        positions = torch.cat((row.position_ids[head], row.position_ids[tail] + shift))
        try:
            with torch.no_grad(), _recorded(backbone, row.num_tokens) as outputs:
                return score(replace(row, position_ids=positions).to(device)), outputs
        except (AttributeError, TypeError) as error:  # the model asks for a mask or takes no other arguments
            raise ConfigError(
                f"policy.model: {type(backbone).__name__} cannot run on a packed row ({error}); expected causal "
                "attention by transformers' attention interface; take another model"
            ) from error

    def gap(one: torch.Tensor, two: torch.Tensor) -> float:
        return float((one - two).abs().max())

    limit, count = _ROUNDING[dtype], _LENGTH - 1  # the first token of a sequence is not predicted
    packed, outputs = run(first, second)
    has_rope = bool(backbone.config.to_dict().get("rope_parameters"))  # other positions may be rows of a table
    followed, followed_outputs = run(first, other, shift=max(0, max_length - _LENGTH) if has_rope else 0)
    if gap(packed[:count], followed[:count]) > limit:
        raise ConfigError(
            f"policy.model: the scores of a sequence depend on what follows it in a row, by "
            f"{gap(packed[:count], followed[:count]):.2g} nats, through {_first_gap(outputs, followed_outputs, head)}; "
            "expected causal attention by transformers' attention interface, and rotary frequencies that do not change "
            "with the length; take another model, or with dynamic or long RoPE lower env_runners.max_context_tokens to "
            "the length before scaling"
        )
    rounding = gap(packed[:count], run(first)[0])
    limit = max(limit, _ROUNDING_FACTOR * rounding)
    if gap(packed[count:], run(second)[0]) > limit:
        _, other_outputs = run(other, second)
        return _first_gap(outputs, other_outputs, tail), False
    branch = np.concatenate([first[: _LENGTH // 2], other[_LENGTH // 2 :]])
    row = _row((first, branch))
    assert row.layout.shared is not None
    scores = torch.empty(2 * count)
    scores[row.column_index] = run(first, branch)[0].cpu()
    return "", gap(scores[count:], run(branch)[0].cpu()) <= limit


def _row(sequences: Sequence[NDArray[np.int64]]) -> MicroBatch:
    offsets = np.arange(len(sequences) + 1) * _LENGTH
    is_model = np.arange(len(sequences) * _LENGTH) % _LENGTH > 0
    num_model = int(is_model.sum())
    flat = FlatTrajectories(
        token_ids=np.concatenate(sequences),
        offsets=offsets,
        response_mask=is_model,
        model_offsets=np.arange(len(sequences) + 1) * (_LENGTH - 1),
        first_sequences=np.arange(len(sequences) + 1),
        rollout_logprobs=np.zeros(num_model, np.float32),
        policy_versions=np.zeros(num_model, np.int32),
    )
    return pack(flat, range(len(sequences)))


@contextmanager
def _recorded(backbone: Any, num_tokens: int) -> Iterator[dict[str, torch.Tensor]]:
    """Record the outputs of the backbone's parts, ``[1, T, ...]`` each, in the order in which they end."""
    parts = dict(backbone.named_children())
    for name, layers in backbone.named_children():
        if isinstance(layers, nn.ModuleList):
            parts |= {f"{name}.{i}.{part}": module for i, x in enumerate(layers) for part, module in x.named_children()}
    outputs: dict[str, torch.Tensor] = {}

    def recorder(name: str) -> Callable[[nn.Module, object, object], None]:
        def record(module: nn.Module, args: object, output: object) -> None:
            found = output[0] if isinstance(output, tuple) else output
            if isinstance(found, torch.Tensor) and found.shape[:2] == (1, num_tokens):
                outputs[f"{name} ({type(module).__name__})"] = found

        return record

    hooks = [module.register_forward_hook(recorder(name)) for name, module in parts.items()]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _first_gap(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tokens: slice) -> str:
    """Return the first part whose outputs differ at ``tokens``; rows of one shape have no rounding between them."""
    for name, output in one.items():
        if name in two and not torch.equal(output[0, tokens], two[name][0, tokens]):
            return name
    return "its layers"
