"""Gateway: an OpenAI-compatible endpoint in each env runner, through which an agent asks the policy.

::

    agent (a function, a program, a Ray task)
      │  POST /v1/chat/completions, with the key of its session
      ▼
    server ──► session ──► Recorder ──► engine        agents: how agents are run, and ended
                  │                                    messages: OpenAI's JSON, pure
                  └──► Trajectory
"""
