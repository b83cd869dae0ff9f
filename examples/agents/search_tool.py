"""The tool of the four agents: it searches with the run's own retriever, at the gateway."""

import json
import os
import urllib.request


def search(query: str) -> str:
    """Search the collection.

    Args:
        query: What to look for, in a few words.
    """
    body = json.dumps({"queries": [query], "topk": 3}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    with urllib.request.urlopen(urllib.request.Request(os.environ["RAGR1_SEARCH_URL"], body, headers)) as answer:
        found = json.load(answer)["result"][0]
    return "\n\n".join(one["contents"] for one in found) or "Nothing was found."


SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the collection.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for, in a few words."}},
            "required": ["query"],
        },
    },
}
INSTRUCTIONS = "Answer the question. Search first. Reply with the answer only."
