"""Names in the directory of a run."""

CHECKPOINTS = "checkpoints"
INDEX = "index"
POLICY = "policy"
"""Folder of the policy before training, if the run made it."""
SFT_POLICY = "policy_sft"
"""Folder of the policy at the end of SFT."""
FOLDERS = (INDEX, POLICY, SFT_POLICY, CHECKPOINTS)
"""Folders of a run that are whole or absent; everything else is files that grow."""
MCP_FILE = "mcp_tools.json"
"""File with the tools that each server of ``environment.mcp`` listed before the run."""
