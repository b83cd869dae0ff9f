"""An agent on smolagents. It sends its calls back as text, so that each turn is a row. STREAM=1 streams."""

import os
import sys

from search_tool import search
from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.monitoring import LogLevel

agent = ToolCallingAgent(
    tools=[tool(search)],
    model=OpenAIModel("policy"),  # of OPENAI_BASE_URL and OPENAI_API_KEY
    max_steps=8,
    verbosity_level=LogLevel.OFF,
    stream_outputs=bool(os.environ.get("STREAM")),
)
answer = agent.run(sys.argv[1])
print(f"\n{answer}")  # a streamed run ends inside a line
