"""An agent that knows no trainer: it asks a model, searches for what the model wants to know, and asks again.

    ragr1 train quickstart training.num_iterations=0 --run-dir runs/sft
    ragr1 train quickstart policy.model=runs/sft/policy_sft policy.options={} sft.num_steps=0 \
        policy.chat_format=hermes environment.agent=examples.agents.plain:solve --run-dir runs/agent
"""

import json
import urllib.request


def post(url: str, key: str, body: dict) -> dict:
    """Return the JSON that a server answers with."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


def solve(task, session) -> str:
    """Return the answer; the policy of the quickstart writes queries in <search>, and its answer in <answer>."""
    messages = [{"role": "user", "content": task.question}]
    for _ in range(4):
        body = {"model": "policy", "messages": messages, "stop": ["</search>", "</answer>"]}
        said = post(f"{session.base_url}/chat/completions", session.api_key, body)["choices"][0]["message"]
        before, tag, queries = said["content"].partition("<search>")
        if not tag:
            return before.partition("<answer>")[2]
        body = {"queries": [query for query in queries.splitlines() if query.strip()][:3], "topk": 1}
        found = post(session.search_url, session.api_key, body)["result"]
        texts = "\n".join(one["contents"] for passages in found for one in passages)
        messages += [said, {"role": "user", "content": f"<information>{texts}</information>"}]
    return ""
