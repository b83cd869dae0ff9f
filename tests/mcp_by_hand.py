"""A server of MCP without the SDK, which starts at once: ``python mcp_by_hand.py LIST``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

SCHEMA = {"type": "object"}
TOOLS = [{"name": name, "inputSchema": SCHEMA} for name in ("pid", "sleep", "die", "leave_child", "lie", "refuse")]


def called(name: str) -> str | None:
    """Return the text of a result."""
    if name == "die":
        sys.exit("the end")
    if name == "leave_child":  # it calls setsid, and its parent ends
        shell = "setsid sleep 600 >/dev/null 2>&1 & echo $!"
        return subprocess.run(["bash", "-c", shell], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    return None if name == "sleep" else str(os.getpid())


for line in sys.stdin:
    asked = json.loads(line)
    answer: dict[str, Any] = {"error": {"code": -32601, "message": "no such method"}}
    if asked["method"] == "initialize":
        info = {"name": "by hand", "version": "1"}
        answer = {"result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}}
    elif asked["method"] == "tools/list":
        answer = {"result": {"tools": json.loads(sys.argv[1]) if len(sys.argv) > 1 else TOOLS}}
    elif asked["method"] == "tools/call":
        name = asked["params"]["name"]
        if (text := called(name)) is None:
            continue
        answer = {"result": {"content": "no list" if name == "lie" else [{"type": "text", "text": text}]}}
        if name == "refuse":
            answer = {"error": {"code": -32602, "message": "there is no such town"}}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
