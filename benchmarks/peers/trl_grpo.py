"""TRL's GRPO trainer, on work that ``benchmarks.peers.ratios`` writes; runs in ``.venv-trl``, without this project.

``.venv-trl/bin/python benchmarks/peers/trl_grpo.py WORK.json`` prints a JSON object per iteration.

The trainer itself samples a single turn: it calls transformers' ``generate`` for the whole batch. Its other way without
a GPU, ``use_transformers_continuous_batching``, is not used: in a trial by hand it was slower. With searches, a
``rollout_func`` samples all trajectories in lock-step. It keeps keys and values between turns, so only new tokens are
computed. What a search finds is in the file and costs nothing here. No token ends a turn: each has ``turn_tokens``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NO_TOKEN = -1


class TimedTrainer(GRPOTrainer):
    """``GRPOTrainer`` that notes the seconds of its parts, and what it computed."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.eos_token_ids = [NO_TOKEN]  # else a completion is cut at a token that ends a text
        self.seconds = dict.fromkeys(("generate", "prepare", "step"), 0.0)
        self.counts: dict[str, int] = {}

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def _generate(self, prompts: list[str]) -> Any:
        with self._clock("generate"):
            found = super()._generate(prompts)
        prompt_ids, completion_ids, mask = found[:3]
        num_new = sum(map(len, completion_ids))
        self.counts = {
            "num_tokens": sum(map(len, prompt_ids)) + num_new,
            "num_sampled": num_new if mask is None else sum(map(sum, mask)),
        }
        return found

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self._clock("prepare"):  # generation included
            return super()._generate_and_score_completions(inputs)

    def training_step(self, *given: Any) -> Any:
        with self._clock("step"):  # preparation included
            return super().training_step(*given)


class Printer(TrainerCallback):
    """Prints a line when an iteration ends; ``trainer`` is set once there is one."""

    trainer: TimedTrainer

    def __init__(self, num_minibatches: int) -> None:
        self._num_minibatches, self._started = num_minibatches, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step % self._num_minibatches == 0:
            now, parts = time.perf_counter(), self.trainer.seconds
            seconds = {
                "iteration_s": now - self._started,
                "generate_s": parts["generate"],
                "old_logprobs_s": parts["prepare"] - parts["generate"],
                "learn_s": parts["step"] - parts["prepare"],
            }
            print(json.dumps(seconds | self.trainer.counts), flush=True)
            self._started, self.trainer.seconds = now, dict.fromkeys(parts, 0.0)


def rewards(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return numbers that differ within a group, and cost nothing."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def padded(rows: list[list[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of rows, padded on the left to the longest."""
    gaps = [max(map(len, rows)) - len(row) for row in rows]
    ids = torch.tensor([[pad_id] * gap + row for gap, row in zip(gaps, rows, strict=True)])
    return ids, torch.tensor([[0] * gap + [1] * len(row) for gap, row in zip(gaps, rows, strict=True)])


def lockstep(tasks: list[dict[str, Any]], pad_id: int) -> Callable[..., dict[str, Any]]:
    """Return the ``rollout_func``: all trajectories take their turns together."""
    by_prompt = {task["prompt"]: task for task in tasks}

    @torch.no_grad()
    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        found = [by_prompt[prompt] for prompt in prompts]
        completions: list[list[int]] = [[] for _ in found]
        env_mask: list[list[int]] = [[] for _ in found]
        prompt_ids = [task["prompt_ids"] for task in found]
        ids, mask = padded(prompt_ids, pad_id)
        model, cache = trainer.accelerator.unwrap_model(trainer.model), DynamicCache()
        for observations in [*zip(*(task["observations"] for task in found), strict=True), [[]] * len(found)]:
            out = model.generate(
                ids, attention_mask=mask, past_key_values=cache, generation_config=trainer.generation_config
            )
            new = out[:, ids.size(1) :]
            for row, (sampled, observation) in enumerate(zip(new.tolist(), observations, strict=True)):
                completions[row] += sampled + observation
                env_mask[row] += [1] * len(sampled) + [0] * len(observation)
            more, more_mask = padded(observations, pad_id)
            ids = torch.cat([out, more.to(out.dtype)], dim=1)
            mask = torch.cat([mask, torch.ones_like(new), more_mask.to(out.dtype)], dim=1)
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None, "env_mask": env_mask}

    return rollout


def main(work_file: str) -> None:
    """Train, and print."""
    work = json.loads(Path(work_file).read_text())
    tokenizer = AutoTokenizer.from_pretrained(work["policy"])
    tasks = [{**task, "prompt": tokenizer.decode(task["prompt_ids"])} for task in work["tasks"]]
    if wrong := [one["prompt"] for one in tasks if tokenizer(one["prompt"])["input_ids"] != one["prompt_ids"]]:
        sys.exit(f"the tokenizer gives other ids for {len(wrong)} prompts, such as {wrong[0]!r}")
    num_minibatches, micro_batch = work["num_minibatches"], work["micro_batch"]
    printer = Printer(num_minibatches)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,  # the weights have the number format, so nothing is converted
            gradient_checkpointing=False,
            shuffle_dataset=False,
            learning_rate=work["lr"],
            max_steps=work["num_iterations"] * num_minibatches,
            generation_batch_size=work["batch_size"],
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=work["batch_size"] // num_minibatches // micro_batch,
            num_generations=work["group_size"],
            max_completion_length=work["turn_tokens"],
            generation_kwargs={"eos_token_id": None},
        )
        printer.trainer = TimedTrainer(
            model=AutoModelForCausalLM.from_pretrained(work["policy"], dtype=getattr(torch, work["dtype"])),
            reward_funcs=rewards,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": task["prompt"]} for task in tasks]),
            processing_class=tokenizer,
            callbacks=[printer],
            rollout_func=lockstep(tasks, tokenizer.pad_token_id) if tasks[0]["observations"] else None,
        )
        printer.trainer.model.generation_config.eos_token_id = None
        printer.trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
