"""An agent on pydantic-ai. OUTPUT=model asks for a structured answer."""

import os
import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from search_tool import INSTRUCTIONS, search


class Answer(BaseModel):
    """The answer to the question."""

    answer: str


# not Agent("openai:policy"), which asks /v1/responses; the provider reads OPENAI_BASE_URL and OPENAI_API_KEY
model = OpenAIChatModel("policy", provider=OpenAIProvider())
output_type = Answer if os.environ.get("OUTPUT") == "model" else str
agent: Agent = Agent(model, output_type=output_type, instructions=INSTRUCTIONS, tools=[search])
found = agent.run_sync(sys.argv[1]).output
print(found.answer if isinstance(found, Answer) else found)
