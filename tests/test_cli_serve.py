"""``ragr1 serve``: OpenAI's client asks a trained policy, which a process serves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import openai
import pytest
from openai import OpenAI
from small_world import a_persons_environment, invoke, make_config, make_files

pytestmark = [pytest.mark.engine, pytest.mark.integration]
QUESTION = "Where is the lamp ?"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run whose policy has learned the format, and no more."""
    files = make_files(tmp_path_factory.mktemp("serve"))
    (files / "recipe.yaml").write_text(json.dumps(make_config(files, num_iterations=0).model_dump()))
    invoke("train", str(files / "recipe.yaml"), "--run-dir", str(files / "run"))
    return str(files / "run")


@contextmanager
def serving(run: str, *options: str, **variables: str) -> Iterator[str]:
    """Run ``ragr1 serve`` as a process; give its URL, and end it as a person does."""
    command = [sys.executable, "-m", "ragr1_actors", "serve", run, "--port", "0", *options]
    environment = a_persons_environment() | variables
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = next((line for line in process.stderr if " answers; " in line), "")
            yield line.split()[0]
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.stderr.read()
            assert (process.wait(60), rest) == (0, "")


def test_openais_client_asks_what_was_trained(run: str) -> None:
    asked = json.loads(invoke("ask", run, QUESTION, "--json"))
    with serving(run) as url, OpenAI(base_url=url, api_key="any", max_retries=0) as client:
        (model,) = client.models.list().data
        fields = {"model": model.id, "messages": [{"role": "user", "content": QUESTION}]}
        found = client.chat.completions.create(**fields)
        parts = list(client.chat.completions.create(stream=True, **fields))
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": QUESTION * 100}])
        body = json.dumps(fields).encode()
        headers = {"Content-Type": "application/json", "Origin": "http://elsewhere.example"}
        with pytest.raises(HTTPError) as refused:
            urlopen(Request(f"{url}/chat/completions", body, headers))
        refused.value.close()
    assert asked["answer"] and found.choices[0].message.content == asked["answer"]
    assert found.choices[0].message.ragr1 == asked
    assert "".join(part.choices[0].delta.content or "" for part in parts) == asked["answer"]
    assert caught.value.code == "context_length_exceeded"
    assert refused.value.code == 403


def test_a_policy_in_a_run_is_served_with_a_token(run: str) -> None:
    policy = str(Path(run) / "policy_sft")
    with serving(policy, "--host", "0.0.0.0", "--token-env", "SESAME", SESAME="open") as url:
        url = url.replace("0.0.0.0", "127.0.0.1")
        with OpenAI(base_url=url, api_key="open", max_retries=0) as client:
            assert client.models.list().data
        with (
            OpenAI(base_url=url, api_key="shut", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


def test_what_cannot_be_served_is_one_sentence(run: str, tmp_path: Path) -> None:
    said = invoke("serve", run, "--host", "0.0.0.0")
    assert said.startswith("error: host '0.0.0.0' can be reached from other machines")
    said = invoke("serve", run, "--token-env", "NOT_SET")
    assert said == "error: --token-env: the environment variable 'NOT_SET' is not set; export it"
    assert invoke("serve", str(tmp_path)).startswith("error: ")
