"""Names in the directory of a run."""

CHECKPOINTS = "checkpoints"
INDEX = "index"
POLICY = "policy"
"""The policy before training, if the run made it."""
SFT_POLICY = "policy_sft"
"""The policy at the end of SFT."""
FOLDERS = (INDEX, POLICY, SFT_POLICY, CHECKPOINTS)
"""What is whole or absent in a run; everything else is files that grow."""
MCP_FILE = "mcp_tools.json"
"""The tools that each server of ``environment.mcp`` listed before the run."""
