"""The engine protocols, the policy's tokenizer, the engines that a recipe names, and the engine that plays scripts.

An engine continues token ids (``Engine``). To take part in ``broadcast`` it has ``ReceivingEngine``'s methods besides,
and to share a device with a learner rank ``ColocatedEngine``'s.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from envs.grammars.tags import ANY_TAG, THINK
from envs.observations import control_tokens, defuse, is_control
from ragr1_actors.core.config import PolicySettings, SamplerConfig
from ragr1_actors.core.content import Content, Image, PlacedImage, images_of, parts_of
from ragr1_actors.core.errors import ConfigError, EngineError, one_line
from ragr1_actors.core.models.model_files import ADVICE, check_code, check_files, code_refused
from ragr1_actors.core.models.vision import ImageReader
from ragr1_actors.core.types import Completion, EncodeFn, FinishReason, Message, OnText, Sampling
from ragr1_actors.core.weight_transport import choose_transport

_TOKENIZER_CONFIG = "tokenizer_config.json"
_CONTENT = "content of an assistant's turn"
_THOUGHT_AT_END = re.compile(r"<think>\s*\Z")
_TEMPLATE_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""Errors of Python in a chat template, besides Jinja's: it may compute, look up and call."""
_MOST_TOKENS_OF_START = 32
"""Number of a prompt's last tokens in which ``<think>`` and the white space after it are searched."""
WakeTag = Literal["weights", "kv_cache"]
"""Memory that a sleeping engine allocates again, in this order."""


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """Settings with which an engine is made, besides the policy's folder and its tokenizer."""

    max_rows: int
    """Limit of requests that run at the same time."""
    max_context_tokens: int
    dtype: str = "float32"
    device: str = "cpu"
    version: int = 0
    """Policy version of the weights in the folder."""
    sleeps: bool = False
    """Whether the engine has to give its device's memory to a learner between two batches: see ``ColocatedEngine``."""
    trust_remote_code: bool = False
    """Whether code in the policy's folder may run."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine, by its option names: ``{"tensor_parallel_size": 2}`` for vLLM."""

    @classmethod
    def of(cls, config: SamplerConfig, version: int) -> EngineArguments:
        """Return the settings of a recipe; ``version`` is the version of the weights in the policy's folder."""
        settings = config.env_runners
        return cls(
            max_rows=settings.max_concurrent_trajectories,
            max_context_tokens=settings.max_context_tokens,
            dtype=config.policy.dtype,
            device="cuda" if settings.num_gpus_per_env_runner else "cpu",
            version=version,
            sleeps=choose_transport(config) == "ipc",
            trust_remote_code=config.policy.trust_remote_code,
            options=settings.engine_options,
        )


class PolicyTokenizer:
    """Hugging Face tokenizer with the methods that a trajectory needs."""

    def __init__(
        self,
        policy_dir: str | Path,
        *,
        trust_remote_code: bool = False,
        template_options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Load the tokenizer and end-of-sequence ids of a folder or hub name.

        ``template_options`` go to the chat template: ``{"enable_thinking": False}``.

        Raises:
            ConfigError: either is missing, or code in the folder would have to be trusted.
            DataError: a file of the folder is damaged.
        """
        # imported here, or the check of a recipe would wait for torch
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        check_code(policy_dir, trusted=trust_remote_code)
        check_files(policy_dir)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(policy_dir, trust_remote_code=trust_remote_code)
        except Exception as error:  # tokenizers raises a plain Exception for a damaged tokenizer.json
            if "trust_remote_code" in str(error):
                raise code_refused(policy_dir, "for its tokenizer") from error
            raise ConfigError(
                f"cannot load a tokenizer from {policy_dir} ({type(error).__name__}: {one_line(error)}); {ADVICE}"
            ) from error
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise ConfigError(
                f"{_file_in(policy_dir, _TOKENIZER_CONFIG)}: {type(self._tokenizer).__name__} is written in Python, "
                "expected a tokenizer with a tokenizer.json; take a model that has one"
            )
        self._policy_dir, self._template_options = policy_dir, dict(template_options)
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters.keys() & template_options.keys()
        if own:
            raise ConfigError(
                f"policy.template_options: got {', '.join(sorted(own))}, which transformers reads itself; expected "
                "names that the chat template reads, such as enable_thinking"
            )
        # the Rust tokenizer, as encoding is called many times per turn, and most of its time is the Python around it
        self._backend: Any = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()  # tokenizer.json may set it
        self._backend.no_padding()
        self._pieces = _for_pieces(self._backend)
        added = self._backend.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        self._control = control_tokens(self._added.values())
        # a document has no tags of the protocol after ``defuse``
        self._unwanted_ids = frozenset(token_id for token_id, token in added.items() if self._is_unwanted(token))
        if not self.encode("question"):  # transformers makes an empty tokenizer if tokenizer.json is missing
            raise ConfigError(f"the tokenizer of {policy_dir} has no words; is its tokenizer.json missing? {ADVICE}")
        self.end_of_turn_id = self._end_of_turn()
        """Token that the chat template puts after an assistant's turn; None if it puts no token there."""
        self.eos_token_ids = self._find_ends()
        """Ids of the tokens that end a turn: end of sequence, and the chat template's end of an assistant's turn."""

    def _find_ends(self) -> frozenset[int]:
        from transformers import GenerationConfig

        ends: list[int | None] = [self._tokenizer.eos_token_id, self.end_of_turn_id]
        with suppress(OSError):  # the file is optional
            more = GenerationConfig.from_pretrained(self._policy_dir).eos_token_id
            ends += more if isinstance(more, list) else [more]
        found = frozenset(token_id for token_id in ends if token_id is not None)
        if not found:
            raise ConfigError(f"the tokenizer in {self._policy_dir} has no end-of-sequence token; set eos_token in it")
        return found

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text that follows other text; names of control tokens in it are plain text.

        Nothing is added, not even a blank. Tags of the protocol become the tokenizer's tokens for them, if it has them,
        special or not.
        """
        ids: list[int] = self._pieces.encode(text, add_special_tokens=False).ids
        if self._unwanted_ids.isdisjoint(ids):
            return ids
        return list(self._plain_pieces.encode(text, add_special_tokens=False).ids)

    def defuse(self, text: str) -> str:
        """Return a document or a question without tags and control tokens, for a prompt: ``"(|im_end|)"``."""
        return defuse(text, self._control)

    def _is_unwanted(self, token: Any) -> bool:
        """Return whether an ``AddedToken`` may come only from a template: control tokens, and all special ones.

        White space is text, and the protocol's tags are written by the environment.
        """
        is_control = token.special or bool(self._control.search(token.content))
        return is_control and bool(token.content.strip()) and not ANY_TAG.fullmatch(token.content)

    @cached_property
    def _plain_pieces(self) -> Any:
        """Copy of the tokenizer that takes no unwanted tokens from a text; few texts need it, and it takes a second."""
        return self._without(self._unwanted_ids)

    @cached_property
    def _plainest_pieces(self) -> Any:
        return self._without(self._added.keys())

    def _without(self, unwanted_ids: Container[int]) -> Any:
        """Return a copy of the tokenizer that takes some added tokens as text.

        This works for BPE, which all policies here have: a Unigram model may find the name in its vocabulary.
        """
        described = json.loads(self._pieces.to_str())
        for token in described["added_tokens"]:
            token["special"] = token["id"] in unwanted_ids
        plain = type(self._pieces).from_str(json.dumps(described))
        plain.encode_special_tokens = True  # as text
        return plain

    def _end_of_turn(self) -> int | None:
        """Return the added token with which the chat template directly follows an assistant's turn, if there is one.

        Base models name another end of sequence than their template writes: Qwen2.5's ``<|endoftext|>``, and
        ``<|im_end|>``.
        """
        if self._tokenizer.chat_template is None:
            return None
        from jinja2 import TemplateSyntaxError

        chat = [Message("user", "a"), Message("assistant", _CONTENT)]
        try:
            text = self._apply_template(chat, is_prompt=False)
        except ConfigError as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                raise
            return None  # a template may refuse this chat; ``prompt_ids`` says whether it refuses the prompt
        _, content, behind = text.rpartition(_CONTENT)
        if not content:  # it leaves an assistant's turns out: its first text ends none
            return None
        found = [i for i, token in self._added.items() if token.strip() and behind.startswith(token)]
        return max(found, key=lambda i: len(self._added[i]), default=None)

    @cached_property
    def _first_ids(self) -> list[int]:
        """Ids that the tokenizer puts before any text: none, or the start of sequence."""
        plain = self._backend.encode(_CONTENT, add_special_tokens=False).ids
        whole: list[int] = self._backend.encode(_CONTENT).ids
        start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return whole[:start]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text that token ids add to text before them; ids that end a turn add none, special ones do."""
        ends = self.eos_token_ids
        kept = token_ids if ends.isdisjoint(token_ids) else [token for token in token_ids if token not in ends]
        return str(self._pieces.decode(kept, skip_special_tokens=False))

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a chat up to the assistant's turn; without a chat template, of the contents alone.

        Contents alone begin with the tokenizer's start of sequence, if it puts one before a text. Special tokens in the
        contents count: a recipe's prompt may hold them.

        Raises:
            ConfigError: the chat template refuses the messages.
        """
        if self._tokenizer.chat_template is None:
            ids, text = [*self._first_ids], "\n".join(self._spelled(one.content) for one in messages) + "\n"
        else:
            ids, text = [], self._apply_template(messages)
        # images apart: after a blank, a tiny policy's token " <" would take the beginning of one
        has_images = bool(images_of(*(one.content for one in messages)))
        images = "|".join(re.escape(self._added[i]) for i in self._reader.token_ids) if has_images else ""
        for piece in re.split(f"((?:{images})+)", text) if images else [text]:
            ids += self._backend.encode(piece, add_special_tokens=False).ids
        return ids

    @cached_property
    def _reader(self) -> ImageReader:
        return ImageReader(self._policy_dir)

    def image_ids(self, image: Image) -> list[int]:
        """Return the token ids of an image: its start, its placeholders and its end.

        Raises:
            ConfigError: the policy reads no images.
        """
        start, placeholder, end = self._reader.token_ids
        rows, cols = self._reader.grid(image)
        return [start, *[placeholder] * (rows * cols), end]

    def place(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[PlacedImage]:
        """Return the places of the images of messages among their token ids: only an image makes these tokens.

        Raises:
            ConfigError: the chat template leaves an image out, or repeats one.
        """
        start, *_ = self._reader.token_ids
        places = [position + 1 for position, token_id in enumerate(token_ids) if token_id == start]
        if len(places) != len(images):
            raise ConfigError(
                f"{_file_in(self._policy_dir, 'chat_template.jinja', _TOKENIZER_CONFIG)}: got a template that writes "
                f"{len(places)} of {len(images)} images, expected all of them once; take another model"
            )
        return [PlacedImage(one, place, *self._reader.grid(one)) for one, place in zip(images, places, strict=True)]

    def _spelled(self, content: Content) -> str:
        """Return a content as text, with the names of an image's tokens in its place, and nowhere else."""
        if isinstance(content, str):
            return content
        names = [self._added[token_id] for token_id in self._reader.token_ids] if images_of(content) else []

        def plain(text: str) -> str:
            for name in names:
                text = text.replace(name, f"({name[1:-1]})")
            return text

        return "".join(
            plain(part) if isinstance(part, str) else "".join(self._added[i] for i in self.image_ids(part))
            for part in parts_of(content)
        )

    def _apply_template(self, messages: Sequence[Message], *, is_prompt: bool = True) -> str:
        """Return the chat template's text."""
        chat = [{"role": message.role, "content": self._spelled(message.content)} for message in messages]
        return self.render(chat, (), is_prompt=is_prompt)

    def render(
        self, chat: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, is_prompt: bool = True
    ) -> str:
        """Return the text of the chat template for messages and tools in its form.

        With ``is_prompt`` it ends at the assistant's turn. Raises ``ConfigError`` if the template refuses them.
        """
        from jinja2 import TemplateError

        conversation: list[Any] = list(chat)
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": is_prompt, **self._template_options}
        if tools:
            options["tools"] = list(tools)
        try:
            return str(self._tokenizer.apply_chat_template(conversation, **options))
        except (TemplateError, *_TEMPLATE_ERRORS) as error:
            raise ConfigError(
                f"{_file_in(self._policy_dir, 'chat_template.jinja', _TOKENIZER_CONFIG)}: the chat template fails "
                f"({type(error).__name__}: {one_line(error)}); correct it, or take another model"
            ) from error

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return self._tokenizer.chat_template is not None

    @cached_property
    def added_texts(self) -> list[str]:
        """Added tokens that a text of others must not produce: all but white space and plain words."""
        return [text for text in self._added.values() if is_control(text)]

    def encode_frame(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a chat template's text, and where each begins in it; added tokens count."""
        encoded = self._pieces.encode(text, add_special_tokens=False)
        return encoded.ids, [start for start, _ in encoded.offsets]

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of a text without any added token."""
        return list(self._plainest_pieces.encode(text, add_special_tokens=False).ids)

    @property
    def end_texts(self) -> list[str]:
        """Texts of the tokens that end a turn."""
        return [self._added[token] for token in sorted(self.eos_token_ids) if token in self._added]

    def lacking(self, num_embeddings: int, prompt_ids: Sequence[int]) -> tuple[list[str], list[str]]:
        """Return the tokens whose ids a model with ``num_embeddings`` lacks: those that may occur, and all others.

        Any text may produce a token that ``encode`` takes; a prompt, here ``prompt_ids``, and the end of a turn also
        have control tokens. ``(["<|im_end|>"], ["<pad>"])``.
        """
        beyond = {i: text for text, i in self._tokenizer.get_vocab().items() if i >= num_embeddings}
        used = (beyond.keys() - self._unwanted_ids) | self.eos_token_ids | set(prompt_ids)
        return [beyond[i] for i in sorted(beyond) if i in used], [beyond[i] for i in sorted(beyond) if i not in used]

    def turn_start(self, prompt_ids: Sequence[int]) -> str:
        r"""Return the policy's turn so far in the prompt: ``"<think>\n"`` if the template begins it with a thought.

        Otherwise it is an empty text.
        """
        found = _THOUGHT_AT_END.search(self.decode(prompt_ids[-_MOST_TOKENS_OF_START:]))
        return found[0] if found is not None else ""

    def tokens_containing(self, characters: set[str]) -> frozenset[int]:
        """Return the ids of the tokens whose text contains any of some characters, or may contain a part of one.

        The text of a token is what it adds to a text before it: vocabularies write blanks and non-ASCII bytes in
        special letters.
        """
        before = self.encode("a")
        ids = list(self._tokenizer.get_vocab().values())
        texts = self._pieces.decode_batch([[*before, token_id] for token_id in ids], skip_special_tokens=False)
        start, wanted = len(self.decode(before)), set(characters)
        if not all(map(str.isascii, characters)):
            wanted.add("\ufffd")  # the text of a part of a character
        return frozenset(i for i, text in zip(ids, texts, strict=True) if not wanted.isdisjoint(text[start:]))


def _for_pieces(backend: Any) -> Any:
    """Return a tokenizer for texts that follow others: the given one, or a copy without its blanks.

    Tokenizers like Llama 2's put a blank before each text and remove it in decoding. That is right only for a whole
    text: the pieces of a trajectory would get or lose one at each boundary.
    """

    def is_exact(text: str) -> bool:
        ids = backend.encode(text, add_special_tokens=False).ids
        return bool(backend.decode([*ids, *ids], skip_special_tokens=False) == text + text)

    if is_exact("a") and is_exact(" a"):
        return backend
    described = json.loads(backend.to_str())
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        described[part] = _without_first_blank(described[part])
    return type(backend).from_str(json.dumps(described))


def _without_first_blank(part: Any) -> Any:
    """Return a part of a tokenizer.json that neither adds nor removes a first blank; None if the part did only that."""
    match part:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return part | {"prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return part | {"add_prefix_space": False}
        case {"type": "Strip", "content": _}:  # the decoder; a normalizer of that name has no content
            return part | {"start": 0}
        case {"type": "Sequence"}:
            return {key: _without_first_blank(value) for key, value in part.items()}
        case list():
            return [kept for each in part if (kept := _without_first_blank(each)) is not None]
    return part


def load_tokenizer(policy_dir: str | Path, policy: PolicySettings) -> PolicyTokenizer:
    """Return the tokenizer of a policy's folder, with the recipe's settings; errors as in ``PolicyTokenizer``."""
    return PolicyTokenizer(
        policy_dir, trust_remote_code=policy.trust_remote_code, template_options=policy.template_options
    )


def _file_in(policy_dir: str | Path, *names: str) -> str:
    """Return the first of some files that the folder has; for a hub name the last of them."""
    found = (str(Path(policy_dir, name)) for name in names if Path(policy_dir, name).is_file())
    return next(found, f"{names[-1]} of {policy_dir}")


class Engine(Protocol):
    """Model that continues token ids. Many requests run at once; each is one coroutine."""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        """Continue ``prompt_token_ids``, the whole context of the trajectory ``request_id``.

        The prefix that it shares with the last call of the same ``request_id`` is not computed again. ``on_text`` is
        called with the turn's whole text so far as it grows, every few tokens; it must return quickly.

        Raises:
            EngineError: the engine cannot answer this request.
            EngineDeadError: the engine no longer answers; its runner has to be replaced.
        """

    def release(self, request_id: str) -> None:
        """Drop the trajectory ``request_id``; its cache may be reused."""

    async def update_weights(self, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        """Swap the weights in. Requests in flight continue with the new ones over a recomputed cache.

        ``weights`` has every parameter by its Hugging Face name, a tied ``lm_head.weight`` included, in the policy's
        dtype; a uint16 array holds the bits of bfloat16, which NumPy lacks. For the engines in ``RECEIVING_ENGINES``,
        with ``learners.lora``, it has adapters, and under ``BASE_KEY`` their base, see ``engines/adapters.py``.
        ``version`` is recorded with every token sampled from now on.
        """

    async def check(self) -> None:
        """Return if the engine is alive, else raise ``EngineDeadError``. It is quick, even if the engine is busy."""

    async def close(self) -> None:
        """Free the model."""


@runtime_checkable
class SeeingEngine(Protocol):
    """Further method of an engine whose policy reads images."""

    def show(self, request_id: str, images: Sequence[PlacedImage]) -> None:
        """Take the images among the ids of the next ``generate`` of a trajectory, which have its placeholders."""


def show_images(engine: Engine, request_id: str, images: Sequence[PlacedImage]) -> None:
    """Give images to an engine; raises ``ConfigError`` if it takes none."""
    if not isinstance(engine, SeeingEngine):
        raise ConfigError(
            f"env_runners.engine: got a message with an image, and {type(engine).__name__} takes texts only; set it to "
            "transformers, vllm or endpoint"
        )
    engine.show(request_id, images)


@runtime_checkable
class ReceivingEngine(Protocol):
    """Further methods of an engine for the values ``broadcast`` and ``ipc`` of ``env_runners.weight_transport``.

    They are the four steps of vLLM's weight transfer. A step raises ``TransferError`` if the weights did not arrive:
    the engine then continues with its old weights or, if these were being overwritten, lets its requests wait until
    ``Engine.update_weights``. An unfinished update is dropped when the next one starts.
    """

    async def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Join the senders of vLLM's backend ``nccl`` or ``ipc``; not called with ``host``."""

    async def start_weight_update(self) -> None:
        """Prepare for the parts of an update."""

    async def receive_weights(self, update_info: Mapping[str, Any], blob: NDArray[np.uint8] | None = None) -> None:
        """Receive a part by vLLM's backend, or with ``host`` a safetensors file, ``blob``.

        With ``host``, ``update_info`` has ``base``, an ``AdapterBase`` as JSON into which the adapters are merged;
        empty for weights.
        """

    async def finish_weight_update(self, version: int) -> None:
        """Swap the weights in; otherwise like ``Engine.update_weights``."""


@runtime_checkable
class ColocatedEngine(ReceivingEngine, Protocol):
    """Further methods of an engine that shares a device with a learner rank: ``weight_transport`` is ``ipc``."""

    async def sleep(self) -> None:
        """Free the device's memory, weights and cache. Requests in flight, and new ones, wait."""

    async def wake_up(self, tag: WakeTag) -> None:
        """Allocate memory again: for ``weights``, which are received next, and afterwards for the ``kv_cache``.

        With the cache the requests continue; their part of it is computed again. An awake engine does not change.
        """


def check_takes_part(engine: Engine, config: SamplerConfig) -> None:
    """Raise a ``ConfigError`` if an engine cannot receive weights in the run's transport."""
    transport = choose_transport(config)
    takes_part: dict[str, type] = {"broadcast": ReceivingEngine, "ipc": ColocatedEngine}
    if not isinstance(engine, takes_part.get(transport, object)):
        raise ConfigError(
            f"got env_runners.weight_transport {transport}, in which the engine {config.env_runners.engine} cannot "
            "take part; set it to object_store"
        )


ENGINES: dict[str, Any] = {
    "transformers": "ragr1_actors.rollout.engines.transformers_engine:TransformersEngine",
    "vllm": "ragr1_actors.rollout.engines.vllm_engine:VLLMEngine",
    "endpoint": "ragr1_actors.rollout.engines.endpoint_engine:EndpointEngine",
}
"""Engines by their names in a recipe; others: ``my_module:MyEngine``. Each imports a library that may be missing.

They are called as ``(policy_dir, tokenizer, EngineArguments) -> Engine``."""


class ScriptedEngine:
    """Returns ``script[0]`` as the first turn of a request, ``script[1]`` as the second, and so on. Log-probs are 0."""

    def __init__(
        self,
        scripts: Mapping[str, Sequence[str]],
        encode: EncodeFn,
        version: int = 0,
        turn_start: Callable[[Sequence[int]], str] = lambda prompt_ids: "",
    ) -> None:
        """Play turns by request id; ``version`` is reported for every token.

        ``turn_start`` is as in ``PolicyTokenizer``: a turn does not repeat the ``<think>`` at the end of its prompt.
        """
        self._scripts = scripts
        self._encode = encode
        self._turn_start = turn_start
        self._version = version
        self._next_turn: dict[str, int] = {}

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        """Return the next scripted turn, cut at ``max_new_tokens``; a part of its tokens has that part of its text."""
        turn = self._next_turn.get(request_id, 0)
        script = self._scripts.get(request_id, ())
        if turn >= len(script):
            raise EngineError(f"got turn {turn + 1} of {request_id!r}, expected at most {len(script)}: its script ends")
        self._next_turn[request_id] = turn + 1
        text = script[turn].removeprefix(THINK) if self._turn_start(prompt_token_ids) else script[turn]
        token_ids = self._encode(text)
        finish, num_new = FinishReason.STOP, len(token_ids)
        if num_new > sampling.max_new_tokens:
            finish, num_new = FinishReason.LENGTH, sampling.max_new_tokens
            text = text[: len(text) * num_new // len(token_ids)]
        if on_text is not None:
            on_text(text)
        return Completion(token_ids[:num_new], [0.0] * num_new, [self._version] * num_new, text, finish)

    def show(self, request_id: str, images: Sequence[PlacedImage]) -> None:
        """Do nothing: the script does not depend on images."""

    def release(self, request_id: str) -> None:
        """Drop ``request_id``; it starts again with its first turn."""
        self._next_turn.pop(request_id, None)

    async def update_weights(self, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        """Set the version; there are no weights."""
        self._version = version

    async def check(self) -> None:
        """Do nothing: there is no process or model."""

    async def close(self) -> None:
        """Do nothing: nothing is held."""
