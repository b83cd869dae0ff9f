"""Checks a custom environment before a run: small episodes over made-up evidence find what would end every trajectory.

::

    for check in await check_env(MyEnv, EnvironmentSettings()):
        print(check.name, check.problem or "ok")
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from envs.base import Answer, EnvContext, Malformed, Search, TextEnv, check_result
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import Message, Task
from retrieval.base import Passage

ODD_TEXTS = (
    "",
    " \n",
    "no tag at all",
    "<search>",
    "</search>",
    "<search></search>",
    "<answer>",
    "</answer><answer>",
    "<search><search>a</search>",
    "<answer>a</answer><search>b</search>",
    "<information>forged</information>",
    '<search>["a", </search>',
    "<search>\0\ufffd\u202e\U0001f50e</search>",
    "<search>" + "a, b\n" * 5_000 + "</search>",
    "<" * 20_000,
)
"""Completions of a policy. ``parse`` may return ``Malformed`` for them, and must not raise."""
_ASYNC = ("reset", "step", "submit", "malformed")
_PLAIN = ("parse", "peek", "close")
_TASK = Task("check/0", "Where does the lamp lie?", ("Riga",), supporting_ids=("lamp",), plan=(("lamp",),))


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    problem: str = ""
    """Empty if there is none."""


class OnePassage:
    """A retriever with one passage."""

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return one passage for each query."""
        return [[Passage("lamp", "lamp", "The lamp lies in Riga.", 1.0)] for _ in queries]


async def check_env(env_class: type[TextEnv], settings: EnvironmentSettings) -> list[Check]:
    """Check the class of an environment; each check makes its own by ``env_class(settings, context)``."""
    trial = _Trial(env_class, settings)
    episodes: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        ("reset returns the prompt as messages", trial.reset),
        ("parse reads any text, odd ones too", trial.parse),
        ("peek looks at half a turn", trial.peek),
        ("step returns a StepResult", trial.step),
        ("submit ends the episode with a finite reward", trial.submit),
        ("submit takes an empty answer", trial.submit_nothing),
        ("malformed returns a StepResult", trial.malformed),
    ]
    return [
        Check("its methods are async where they wait, and plain where they do not", _async_problem(env_class)),
        Check("stop is a tuple of texts", _stop_problem(env_class)),
        *[Check(name, await _problem(play)) for name, play in episodes],
    ]


@dataclass(frozen=True, slots=True)
class _Trial:
    """The episodes. A method raises if something is wrong."""

    env_class: type[TextEnv]
    settings: EnvironmentSettings

    def _make(self) -> TextEnv:
        make: Callable[..., TextEnv] = self.env_class
        return make(self.settings, EnvContext(OnePassage(), lambda text: list(text.encode())))

    async def _start(self) -> TextEnv:
        env = self._make()
        await env.reset(_TASK)
        return env

    async def reset(self) -> None:
        messages: object = await self._make().reset(_TASK)
        if not isinstance(messages, list) or not messages or not all(isinstance(m, Message) for m in messages):
            raise TypeError(f"reset returned {messages!r}, expected a list of at least one Message")
        if not any(_TASK.question in message.content for message in messages):
            raise ValueError("no message holds the question: the policy would never see what to answer")

    async def parse(self) -> None:
        env = await self._start()
        for text in ODD_TEXTS:
            _check_parse(env, text)

    async def peek(self) -> None:
        env = await self._start()
        text = "<search>lamp\nRiga</search>"
        for end in range(0, len(text) + 3, 3):
            env.peek(text[:end])
        env.close()  # a search may be under way

    async def step(self) -> None:
        env = await self._start()
        check_result(await env.step(["lamp"]), "step")

    async def submit(self) -> None:
        env = await self._start()
        await env.step(["lamp"])
        if not check_result(await env.submit("Riga"), "submit").terminated:
            raise ValueError("submit returned terminated=False, expected True: an answer ends the trajectory")
        env.close()

    async def submit_nothing(self) -> None:
        check_result(await (await self._start()).submit(""), "submit")

    async def malformed(self) -> None:
        check_result(await (await self._start()).malformed("no tag"), "malformed")


async def _problem(play: Callable[[], Awaitable[None]]) -> str:
    try:
        await play()
    except Exception as error:  # a user's environment may raise anything
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def _async_problem(env_class: type[TextEnv]) -> str:
    wrong = [f"{name} is plain, expected async def" for name in _ASYNC if not _is_async(env_class, name)]
    wrong += [f"{name} is async, expected plain def" for name in _PLAIN if _is_async(env_class, name)]
    return "; ".join(wrong)


def _is_async(env_class: type[TextEnv], name: str) -> bool:
    return inspect.iscoroutinefunction(inspect.getattr_static(env_class, name))


def _stop_problem(env_class: type[TextEnv]) -> str:
    stop: object = env_class.stop
    if isinstance(stop, property):  # every instance has its own
        return ""
    if isinstance(stop, tuple) and all(isinstance(text, str) and text for text in stop):
        return ""
    return f"got {stop!r}, expected a tuple of texts that are not empty, such as ('</search>', '</answer>')"


def _check_parse(env: TextEnv, text: str) -> None:
    shown = repr(text if len(text) <= 40 else f"{text[:37]}...")
    try:
        action: object = env.parse(text)
    except Exception as error:  # as above
        raise ValueError(f"parse({shown}) raised {type(error).__name__}: {error}") from error
    if not isinstance(action, Search | Answer | Malformed):
        raise TypeError(f"parse({shown}) returned {action!r}, expected Search, Answer or Malformed")
