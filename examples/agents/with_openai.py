"""An agent on OpenAI's client.

    ragr1 train my_recipe.yaml 'environment.agent={command: [python, examples/agents/with_openai.py, "{question}"]}'

STREAM=1 streams.
"""

import json
import os
import sys

from openai import OpenAI
from search_tool import INSTRUCTIONS, SCHEMA, search

client = OpenAI()  # of OPENAI_BASE_URL and OPENAI_API_KEY
messages: list = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": sys.argv[1]}]
while True:
    asked = {"model": "policy", "messages": messages, "tools": [SCHEMA]}
    if os.environ.get("STREAM"):
        with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**asked).choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        found = search(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
print(message.content)
