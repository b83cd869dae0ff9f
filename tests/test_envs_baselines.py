"""The baselines: a direct answer, and standard RAG, played by scripts."""

from __future__ import annotations

from functools import partial

import pytest
from fakes import BrokenRetriever, ByteTokenizer, DictRetriever, environment

from envs.base import EnvContext
from envs.grammars.tags import Action, Answer, Malformed, read_answer
from envs.measures import Reward, RewardContext, num_queries, num_rounds
from envs.options import Mode
from envs.search import SearchEnv
from ragr1_actors.core.types import Sampling, StopReason, Task, Trajectory
from ragr1_actors.evaluation.baselines import DIRECT_PROMPT, RAG_PROMPT, NoRetriever
from ragr1_actors.rollout.engines.base import ScriptedEngine
from ragr1_actors.rollout.recorder import EnvAttempt, Recorder, run_trajectory
from retrieval.base import Passage, Retriever

TASK = Task("t/0", "Where was {passages} Ana Bell born?", ("Riga",), supporting_ids=("p0",))
ANA = Passage("p0", "Ana Bell", "Ana Bell was born in {question} Riga.", 0.9)
TOKENIZER = ByteTokenizer()


async def play(mode: Mode, turn: str, retriever: Retriever, **settings: object) -> Trajectory:
    env = SearchEnv(environment({"mode": mode, **settings}), EnvContext(retriever, TOKENIZER.encode))
    engine = ScriptedEngine({"one": [turn]}, TOKENIZER.encode)
    reward = partial(Reward(environment({})), context=RewardContext("eval"))
    recorder = Recorder("one", engine.generate, TOKENIZER, Sampling(500), 4000, 0)
    return await run_trajectory(EnvAttempt(env, recorder), TASK, reward=reward)


def prompt_of(trajectory: Trajectory) -> str:
    return TOKENIZER.decode([int(token) for token in trajectory.token_ids[trajectory.kinds == 0]])


async def test_a_direct_answer_never_searches() -> None:
    retriever = DictRetriever([ANA])
    found = await play("direct", "<think> a lake </think><answer> Riga</answer>", retriever, prompt=DIRECT_PROMPT)
    assert (found.answer, found.reward, found.stop_reason) == ("Riga", 1.0, StopReason.ANSWERED)
    assert (num_rounds(found), num_queries(found), retriever.calls) == (0, 0, [])
    assert TASK.question in prompt_of(found)
    assert await NoRetriever({}).search(["a", "b"], 3) == [[], []]


async def test_rag_searches_once_with_the_question_and_shows_the_passages() -> None:
    retriever = DictRetriever([Passage(ANA.id, TASK.question, ANA.text, 0.9)])
    found = await play("rag", "<answer>Riga</answer>", retriever, prompt=RAG_PROMPT, top_k=2)
    assert retriever.calls == [[TASK.question]]
    shown = prompt_of(found)
    assert shown.count("<information>\nQuery:") == 1  # a passage in the braces of a field is not one
    assert shown.index("Ana Bell was born in {question} Riga.") < shown.index(f"Question: {TASK.question}")
    assert (found.reward, num_rounds(found), num_queries(found)) == (1.0, 1, 1)
    (call,) = found.turns[0].calls
    assert call.arguments == {"query": TASK.question, "k": 2}
    assert [record.id for record in call.records] == ["p0"]
    assert call.waited_s == call.latency_s


async def test_a_prompt_without_a_place_has_the_passages_behind_it() -> None:
    retriever = DictRetriever([Passage(ANA.id, TASK.question, ANA.text, 0.9)])
    found = await play("rag", "<answer>Oslo</answer>", retriever, prompt="Q: {question}", observation_format="searchr1")
    assert prompt_of(found).startswith(f"user: Q: {TASK.question}\n<information>Doc 1(Title: {TASK.question}) Ana Bell")
    assert found.reward == 0.0


async def test_a_search_that_fails_is_a_failure_of_the_retrieval() -> None:
    found = await play("rag", "<answer>Riga</answer>", BrokenRetriever())
    assert found.stop_reason is StopReason.RETRIEVAL_FAILED


@pytest.mark.parametrize("mode", ["direct", "rag"])
async def test_a_turn_without_an_answer_ends_the_trajectory(mode: Mode) -> None:
    found = await play(mode, "<search> Ana Bell</search>", DictRetriever([ANA]))
    assert (found.answer, found.stop_reason) == ("", StopReason.MAX_TURNS)
    assert num_queries(found) == (mode == "rag")


@pytest.mark.parametrize(
    ("completion", "action"),
    [
        ("<think>a <answer>no</answer></think> <answer> Riga </answer> more", Answer("Riga")),
        ("Riga", Answer("Riga")),
        ("<think> hm </think>\nRiga\n", Answer("Riga")),
        ("<answer> Riga", Malformed("<answer> is never closed")),
        ("<think> hm", Malformed("<think> is never closed")),
        ("<think> it goes inside <answer> and </answer>", Malformed("<think> is never closed")),
        ("<think> inside <answer> and </answer>.</think><answer> Riga</answer>", Answer("Riga")),
        ("<answer> Riga</answer></think>", Answer("Riga")),
        ("<answer> <search>Riga</search></answer>", Malformed("<search> inside the answer")),
        ("<think> hm </think> ", Malformed("the turn has no answer")),
    ],
)
def test_what_counts_as_an_answer(completion: str, action: Action) -> None:
    assert read_answer(completion) == action
