"""Command ``ragr1 serve``: a trained policy for any OpenAI client."""

from __future__ import annotations

from ragr1_actors.cli import (
    START_AGAIN,
    AllowHostOption,
    CheckpointArgument,
    HostOption,
    PortOption,
    TokenEnvOption,
    print_error,
)
from ragr1_actors.cli.ask import check_inputs, loading_policy
from ragr1_actors.core.credentials import read_secret
from ragr1_actors.core.process.imports import quick_imports
from ragr1_actors.core.process.interrupts import ended_during_imports


def serve(
    run: CheckpointArgument,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    token_env: TokenEnvOption = "",
    allow_host: AllowHostOption = None,
) -> None:
    """Serve a trained policy to OpenAI's clients: POST /v1/chat/completions. The run's tools run in this process."""
    from cluster.http import check_token

    token = read_secret("--token-env", token_env)
    check_token(host, token)  # before the policy is loaded
    if note := check_inputs(run):
        print_error(f"note: {note}", "yellow")
    with ended_during_imports(START_AGAIN), quick_imports():
        from ragr1_actors.evaluation.serving import PolicyServer, load_policy, run_policy_server

    with loading_policy():
        policy = load_policy(run)
    run_policy_server(PolicyServer(policy, host=host, port=port, token=token, allowed_hosts=allow_host or ()))
