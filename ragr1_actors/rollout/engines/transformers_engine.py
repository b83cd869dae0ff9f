"""Continuous batching over any Hugging Face causal language model: the engine for small models and CPUs.

One loop serves all requests. Each pass is a prefill of the waiting requests or one decode step of the running ones::

    generate() ──► waiting ──prefill──► active ──decode──► active ... ──stop/length──► idle (cache kept) ──► generate()

In the rows of the cache, active trajectories come before idle ones, which wait for their documents. The next turn of a
trajectory computes only the tokens that are not cached yet. What it has in common with another one it copies from the
row of that one: one trajectory of a group computes the prompt, and the others wait a pass.
"""

from __future__ import annotations

import asyncio
from bisect import bisect, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load
from torch import Tensor

from ragr1_actors.core.content import PlacedImage
from ragr1_actors.core.errors import EngineError, one_line
from ragr1_actors.core.models.huggingface import PreTrainedModel
from ragr1_actors.core.models.model_files import load_model
from ragr1_actors.core.models.vision import reads_images, rope_positions
from ragr1_actors.core.models.vision_inputs import VisionInputs
from ragr1_actors.core.types import Completion, FinishReason, OnText, Sampling
from ragr1_actors.core.weight_transport import BASE_KEY, PART_BYTES, AdapterBase, as_weight, in_parts
from ragr1_actors.rollout.engines.adapters import merged_weights
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer, WakeTag
from ragr1_actors.rollout.engines.decoding import GROUPED_ATTENTION, RowCache, sample, uniform

PREFILL_TOKENS = 8192
"""Limit of padded tokens in one prefill pass."""
WORTH_SHARING = 32
"""New tokens of a request from which requests are compared. A comparison takes 20 µs of CPU per request."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TurnText:
    """Text of a turn while its tokens are sampled. Each token is decoded at most a few times.

    Tokens are decoded together with the last piece of text, since a tokenizer may write a token differently at the
    start of a text. A character of several tokens appears with its last token. The text only grows, and is always a
    prefix of the decoded turn.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Start a turn."""
        self.text = ""
        self._decode = decode
        self._start = 0  # index of the first token of the last piece
        self._end = 0  # number of tokens that are in the text
        self._num_known = 0  # characters of the tokens from start to end
        self._next_try = 0  # number of tokens at which to decode again

    def grow(self, token_ids: Sequence[int]) -> bool:
        """Take the turn's tokens so far; return whether the text has grown."""
        if len(token_ids) < self._next_try:
            return False
        recent = self._decode(token_ids[self._start :])
        if recent.endswith("\ufffd") or len(recent) <= self._num_known:
            # the start of a character, or a special token; with more of them, the next try comes after more tokens
            self._next_try = len(token_ids) + 1 + (len(token_ids) - self._end) // 8
            return False
        self.text += recent[self._num_known :]
        self._start, self._end = self._end, len(token_ids)
        self._num_known = len(self._decode(token_ids[self._start :]))
        return True


@dataclass(slots=True)
class Session:
    """Trajectory in the engine, from its first turn until it is released."""

    request_id: str
    row: int
    """Row of the cache; -1 without one."""
    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0
    """Number of tokens whose keys and values are in the cache."""
    sampling: Sampling = field(default_factory=lambda: Sampling(0))
    num_prompt: int = 0
    images: Sequence[PlacedImage] = ()
    """Images among the tokens."""
    shown: Sequence[PlacedImage] = ()
    """Images for the next turn."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    future: asyncio.Future[Completion] | None = None
    """Result of the turn that is being generated."""
    on_text: OnText | None = None
    turn_text: TurnText | None = None
    """Text of the turn; None without ``on_text``."""

    @property
    def num_new(self) -> int:
        """Number of tokens to compute."""
        return len(self.tokens) - self.num_cached

    @property
    def seed(self) -> int:
        """Seed of the sampling; a request without one gets a seed from its id."""
        seed = self.sampling.seed
        return (hash(self.request_id) if seed is None else seed) & 0xFFFFFFFFFFFFFFFF

    def report_text(self) -> None:
        """Call ``on_text`` with the turn's text so far, if it has grown."""
        if self.on_text is None or self.turn_text is None or self.future is None or self.future.done():
            return
        try:
            if self.turn_text.grow(self.tokens[self.num_prompt :]):
                self.on_text(self.turn_text.text)
        except Exception as error:  # the caller's code: it ends its request and no other
            self.future.set_exception(error)
            self.future = None


class TransformersEngine:
    """``Engine`` over a model that ``AutoModelForCausalLM`` loads."""

    def __init__(self, policy_dir: str | Path, tokenizer: PolicyTokenizer, settings: EngineArguments) -> None:
        """Load the model.

        Raises:
            DataError: the folder holds no model, or a damaged one.
            EngineError: ``settings.options`` are not empty, or the engine cannot run such a model.
        """
        if settings.options:
            raise EngineError(f"the transformers engine has no options, got {', '.join(settings.options)}")
        model = load_model(policy_dir, dtype=_DTYPES[settings.dtype], trust_remote_code=settings.trust_remote_code)
        if model._is_stateful:
            raise EngineError(
                f"the layers of {type(model).__name__} keep a state beside keys and values, which the transformers "
                "engine cannot hold per trajectory; set env_runners.engine to vllm"
            )
        if model.config._attn_implementation != "sdpa":  # its own attention takes no mask of booleans
            raise EngineError(
                f"{type(model).__name__} cannot attend by torch's scaled_dot_product_attention, which the transformers "
                "engine needs; set env_runners.engine to vllm"
            )
        model.set_attn_implementation(GROUPED_ATTENTION)
        self.model: PreTrainedModel = model.to(settings.device).eval()
        self.version = settings.version
        """Policy version of the weights in ``model``; during an update, of the weights before it."""
        self._device = torch.device(settings.device)
        self._vision = VisionInputs(model, policy_dir) if reads_images(policy_dir) else None
        self._tokenizer = tokenizer
        most = (settings.max_rows, settings.max_context_tokens)
        self._cache = RowCache(model.config.get_text_config(), model.dtype, self._device, *most)
        self._max_rows = settings.max_rows
        self._sessions: dict[str, Session] = {}
        self._resident: list[Session] = []  # index is the row
        self._num_active = 0
        self._waiting: list[Session] = []
        self._has_postponed = False  # whether some wait for a prefix that the last prefill has computed
        self._loop_task: asyncio.Task[None] | None = None
        self._received: set[str] = set()  # names received in the started update
        self._adapters: dict[str, Tensor] = {}
        self._base = ""
        self._is_whole = asyncio.Event()  # not set while weights are being overwritten
        self._is_whole.set()
        self._is_awake = asyncio.Event()
        self._is_awake.set()
        # the tokens that can complete a stop string, as they contain its last character
        self._candidates = lru_cache(64)(lambda stop: tokenizer.tokens_containing({string[-1] for string in stop}))

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of all trajectories; 0 while there is none."""
        return self._cache.num_bytes

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        """Continue ``prompt_token_ids``; see ``Engine.generate``."""
        session = self._sessions.get(request_id)
        if session is None:
            session = self._sessions[request_id] = Session(request_id, row=-1)
        if session.future is not None:
            raise EngineError(f"request {request_id!r} is being generated already; one turn at a time")
        images, session.shown = session.shown, ()
        session.num_cached = _common_prefix(session.tokens[: session.num_cached], prompt_token_ids)
        session.num_cached = _before_other_images(session.num_cached, session.images, images)
        session.images = images
        # At least one token is computed, since the logits of the last one are needed
        session.num_cached = min(session.num_cached, len(prompt_token_ids) - 1)
        session.tokens = list(prompt_token_ids)
        session.sampling, session.num_prompt = sampling, len(prompt_token_ids)
        session.logprobs, session.versions = [], []
        session.on_text = on_text
        session.turn_text = None if on_text is None else TurnText(self._tokenizer.decode)
        session.future = asyncio.get_running_loop().create_future()
        self._waiting.append(session)
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._serve())
        return await session.future

    def show(self, request_id: str, images: Sequence[PlacedImage]) -> None:
        """See ``SeeingEngine``."""
        self._sessions.setdefault(request_id, Session(request_id, row=-1)).shown = images

    def release(self, request_id: str) -> None:
        """Drop a trajectory that is not being generated, and free its row."""
        session = self._sessions.pop(request_id, None)
        if session is None:
            return
        if session in self._waiting:
            self._waiting.remove(session)
        if session.row >= 0:
            if session.row < self._num_active:
                self._deactivate(session)
            self._swap(session.row, len(self._resident) - 1)
            self._resident.pop()
            if not self._resident:  # between two batches the learner can have the memory
                self._cache.clear()

    async def update_weights(self, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        """Swap the weights in between two passes; every trajectory's cache is then computed again."""
        arrays = ((name, value) for name, value in weights.items() if name != BASE_KEY)
        await self.start_weight_update()
        for part in in_parts(arrays, PART_BYTES):  # read-only arrays, of which torch warns: copied
            state = {name: as_weight(torch.from_numpy(np.array(value))) for name, value in part.items()}
            self._receive(state, str(weights.get(BASE_KEY, "")))
        await self.finish_weight_update(version)

    async def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Do nothing: this engine's backend is ``host``."""

    async def start_weight_update(self) -> None:
        """Let requests wait: weights are overwritten in place from now on, and must not be mixed."""
        self._is_whole.clear()
        self._received, self._adapters, self._base = set(), {}, ""

    async def receive_weights(self, update_info: Mapping[str, Any], blob: NDArray[np.uint8] | None = None) -> None:
        """Overwrite a part of the weights; see ``ReceivingEngine``."""
        assert blob is not None, "this engine's backend is host"
        self._receive(load(blob.tobytes()), update_info["base"])

    def _receive(self, weights: Mapping[str, Tensor], base: str) -> None:
        self._base = base
        if base:
            self._adapters |= weights
        else:
            self.model.load_state_dict(weights, strict=False)
            self._received |= weights.keys()

    async def finish_weight_update(self, version: int) -> None:
        """Check that everything was received, merge adapters, and continue."""
        parameters = dict(self.model.named_parameters())
        if self._base:
            base = AdapterBase.model_validate_json(self._base)
            for name, value in merged_weights(self._adapters, base, self.model.dtype, self._device):
                parameters[name].data.copy_(value)  # the others never change
        elif missing := parameters.keys() - self._received:
            raise EngineError(f"weight update lacks {len(missing)} parameters, {min(missing)} among them")
        self.version = version
        self._forget()
        self._is_whole.set()

    def _forget(self) -> None:
        """Let every trajectory's cache be computed again."""
        for session in self._resident:
            session.num_cached = 0
        self._waiting.extend(self._resident[: self._num_active])
        self._num_active = 0

    async def sleep(self) -> None:
        """Drop the cache; the weights stay. See ``ColocatedEngine.sleep``."""
        self._is_awake.clear()
        self._forget()
        self._cache.clear()

    async def wake_up(self, tag: WakeTag) -> None:
        """See ``ColocatedEngine.wake_up``."""
        if tag == "kv_cache":
            self._is_awake.set()

    async def check(self) -> None:
        """Do nothing: the engine lives in this process."""

    async def close(self) -> None:
        """Stop serving; running requests end with an ``EngineError``."""
        if self._loop_task is not None:
            self._loop_task.cancel()
        self._fail(EngineError("the engine was closed"))

    async def _serve(self) -> None:
        """Run passes until nothing waits or runs. Coroutines that wait for a result run between two passes."""
        try:
            while self._waiting or self._num_active:
                if not (self._is_whole.is_set() and self._is_awake.is_set()):
                    await self._is_whole.wait()
                    await self._is_awake.wait()
                    continue
                # A large prefill is more efficient; if few rows are active, little decoding waits for it
                is_full = self._num_active == len(self._resident) >= self._max_rows
                pays = self._has_postponed or is_full or len(self._waiting) * 4 >= self._num_active
                if self._waiting and pays:
                    self._prefill()
                else:
                    self._decode()
                await asyncio.sleep(0)
        except Exception as error:  # any error of a model fails every request; else they would wait without end
            self._forget()  # the pass, or the growth of the cache, may have ended between two layers
            self._cache.clear()
            self._fail(EngineError(f"generation failed: {one_line(error)}"))

    def _fail(self, error: EngineError) -> None:
        for session in self._sessions.values():
            if session.future is not None and not session.future.done():
                session.future.set_exception(error)
            session.future = None
        self._waiting.clear()
        self._num_active = 0

    # -- rows ------------------------------------------------------------------------------------------------------

    def _swap(self, row_a: int, row_b: int) -> None:
        resident = self._resident
        self._cache.swap(row_a, row_b, max(resident[row_a].num_cached, resident[row_b].num_cached))
        resident[row_a], resident[row_b] = resident[row_b], resident[row_a]
        resident[row_a].row, resident[row_b].row = row_a, row_b

    def _deactivate(self, session: Session) -> None:
        self._num_active -= 1
        self._swap(session.row, self._num_active)

    def _find_row(self, session: Session) -> bool:
        """Give the session a row: a free one, or an idle trajectory's, which then computes its prefix again."""
        if session.row >= 0:
            return True
        if len(self._resident) < self._max_rows:
            session.row = len(self._resident)
            self._resident.append(session)
            return True
        for victim in reversed(self._resident[self._num_active :]):
            if victim.future is None:
                row = victim.row
                victim.row, victim.num_cached = -1, 0
                session.row = row
                self._resident[row] = session
                return True
        return False

    # -- passes ----------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Compute the uncached tokens of waiting requests, and sample their first tokens."""
        batch = self._choose()
        if not batch:  # no row is free: let the active ones finish
            self._decode()
            return
        chosen = {id(session) for session in batch}
        self._waiting = [session for session in self._waiting if id(session) not in chosen]
        longest = max(session.num_new for session in batch)
        self._forward(batch, torch.tensor([session.row for session in batch], device=self._device), longest)
        for session in batch:
            if session.future is not None:
                self._swap(session.row, self._num_active)
                self._num_active += 1

    def _choose(self) -> list[Session]:
        """Return waiting requests for one pass. What others have of their tokens is copied to their rows."""
        batch: list[Session] = []
        copies: list[tuple[int, int, int]] = []
        longest, self._has_postponed = 0, False
        ordered = sorted(self._waiting, key=lambda session: session.num_new)
        known = _Beginnings(self._resident if ordered[-1].num_new > WORTH_SHARING else [])
        pending = _Beginnings([])
        for session in ordered:
            if not self._find_row(session):
                continue  # a later one may have its row already
            source, length = known.longest(session)
            if length > session.num_cached:
                session.num_cached = length
                copies.append((source, session.row, length))
            num_new = session.num_new
            if num_new > WORTH_SHARING and pending.longest(session)[1] - session.num_cached > num_new // 2:
                self._has_postponed = True
                continue
            if batch and max(longest, num_new) * (len(batch) + 1) > PREFILL_TOKENS:
                break
            longest = max(longest, num_new)
            batch.append(session)
            pending.add(session, len(session.tokens) if num_new > WORTH_SHARING else 0)
        if copies:
            self._cache.reserve(len(self._resident), max(length for *_, length in copies))
        for copied in copies:
            self._cache.copy(*copied)
        return batch

    def _decode(self) -> None:
        """Sample one token for every active trajectory."""
        active = self._resident[: self._num_active]
        self._forward(active, slice(0, self._num_active), 1)
        for session in active:
            if session.future is None:
                self._deactivate(session)

    @torch.no_grad()
    def _forward(self, sessions: list[Session], rows: slice | Tensor, num_new: int) -> None:
        """Run the model over each session's uncached tokens, padded on the left to ``num_new``, and sample."""
        length = max(len(session.tokens) for session in sessions)
        self._cache.reserve(len(self._resident), length)
        input_ids = np.zeros((len(sessions), num_new), dtype=np.int64)
        positions = np.full((len(sessions), num_new), -1, dtype=np.int64)
        starts = [session.num_cached for session in sessions]
        for i, session in enumerate(sessions):
            new = session.num_new
            input_ids[i, num_new - new :] = session.tokens[session.num_cached :]
            positions[i, num_new - new :] = np.arange(session.num_cached, len(session.tokens))
            session.num_cached = len(session.tokens)
        position_ids = torch.from_numpy(positions).to(self._device)
        is_padding = position_ids < 0
        self._cache.select(rows, position_ids.masked_fill(is_padding, self._cache.scratch), length)
        position_ids = position_ids.clamp(min=0)  # padding attends to column 0, and is never read
        mask = torch.arange(length, device=self._device) <= position_ids.unsqueeze(-1)  # [n, num_new, length]
        if self._vision is not None:
            self._take(sessions, self._see(sessions, input_ids, starts, mask))
            return
        logits = self.model(
            input_ids=torch.from_numpy(input_ids).to(self._device),
            attention_mask=mask.unsqueeze(1),
            position_ids=position_ids,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        self._take(sessions, logits)

    def _see(
        self, sessions: list[Session], input_ids: NDArray[np.int64], starts: Sequence[int], mask: Tensor
    ) -> Tensor:
        """Return the last logits of a policy that reads images; ``starts`` are the first tokens that are computed."""
        assert self._vision is not None
        num_new = input_ids.shape[1]
        positions, images = np.zeros((3, *input_ids.shape), dtype=np.int64), list[PlacedImage]()
        for i, (session, start) in enumerate(zip(sessions, starts, strict=True)):
            end = len(session.tokens)
            positions[:, i, num_new - (end - start) :] = rope_positions(end, session.images, start)
            shift = (i + 1) * num_new - end
            images += [replace(one, start=one.start + shift) for one in session.images if one.start >= start]
        hidden = self.model.get_decoder()(
            **self._vision(torch.from_numpy(input_ids).to(self._device), images),
            attention_mask=mask.unsqueeze(1),
            position_ids=torch.from_numpy(positions).to(self._device),
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        logits: Tensor = self.model.get_output_embeddings()(hidden[:, -1])
        return logits

    def _take(self, sessions: list[Session], logits: Tensor) -> None:
        """Sample one token for each session, and finish the sessions that are done."""
        steps = np.array([len(s.tokens) - s.num_prompt for s in sessions], dtype=np.uint64)
        seeds = np.array([s.seed for s in sessions], dtype=np.uint64)
        tokens, logprobs = sample(
            logits,
            torch.tensor([s.sampling.temperature for s in sessions], device=self._device),
            torch.tensor([s.sampling.top_p for s in sessions], device=self._device),
            torch.from_numpy(uniform(seeds, steps)).to(self._device),
        )
        for session, token, logprob in zip(sessions, tokens.tolist(), logprobs.tolist(), strict=True):
            session.tokens.append(token)
            session.logprobs.append(logprob)
            session.versions.append(self.version)
            reason = self._finish_reason(session, token)
            session.report_text()
            if reason is not None:
                self._finish(session, reason)

    def _finish_reason(self, session: Session, token: int) -> FinishReason | None:
        if token in self._tokenizer.eos_token_ids:
            return FinishReason.STOP
        stop = session.sampling.stop
        if token in self._candidates(stop):
            new_ids = session.tokens[session.num_prompt :]
            # A stop string has at most one token per byte; a tokenizer may drop a blank at the start of the one before
            tail = self._tokenizer.decode(new_ids[-1 - max(len(string.encode()) for string in stop) :])
            if any(string in tail for string in stop):
                return FinishReason.STOP
        full = len(session.tokens) - session.num_prompt >= session.sampling.max_new_tokens
        return FinishReason.LENGTH if full else None

    def _finish(self, session: Session, reason: FinishReason) -> None:
        token_ids = session.tokens[session.num_prompt :]
        text = self._tokenizer.decode(token_ids)
        if session.future is not None and not session.future.done():
            session.future.set_result(Completion(token_ids, session.logprobs, session.versions, text, reason))
        session.future = None


class _Beginnings:
    """Beginnings of sessions, sorted, so that the one with which another has most tokens in common is beside it."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        """Take what is cached of sessions."""
        self._sorted: list[tuple[list[int], int, Session]] = []
        for session in sessions:
            self.add(session, session.num_cached)

    def add(self, session: Session, length: int) -> None:
        """Take the first ``length`` tokens of a session."""
        if length:
            insort(self._sorted, (session.tokens[:length], id(session), session))

    def longest(self, session: Session) -> tuple[int, int]:
        """Return the row with which a session has most tokens in common, and their number; its last one is no part."""
        tokens = session.tokens[:-1]
        at = bisect(self._sorted, (tokens,))
        found = [(session.row, 0)]
        for known, _, other in self._sorted[max(0, at - 1) : at + 1]:
            if other.row >= 0:  # else its row was taken
                length = _common_prefix(known, tokens)
                found.append((other.row, _before_other_images(length, session.images, other.images)))
        return max(found, key=itemgetter(1))


def _before_other_images(length: int, images: Sequence[PlacedImage], others: Sequence[PlacedImage]) -> int:
    """Return the number of the first ``length`` tokens with the same images: others may have the same placeholders."""
    return length if images == others else min([length, *(one.start for one in {*images} ^ {*others})])


def _common_prefix(old: Sequence[int], new: Sequence[int]) -> int:
    if list(new[: len(old)]) == list(old):  # the usual case: the context only grew
        return len(old)
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
