"""An agent on litellm. STREAM=1 streams."""

import json
import os
import sys

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else the import fetches a list of prices

import litellm
from search_tool import INSTRUCTIONS, SCHEMA, search

messages: list = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": sys.argv[1]}]
while True:
    # "openai/" is the protocol; OPENAI_BASE_URL and OPENAI_API_KEY say where
    streams = bool(os.environ.get("STREAM"))
    answer = litellm.completion(model="openai/policy", messages=messages, tools=[SCHEMA], stream=streams)
    message = (litellm.stream_chunk_builder(list(answer)) if streams else answer).choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        found = search(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
print(message.content)
