"""The tool that runs Python in the task's sandbox; environments offer it as it is."""

from __future__ import annotations

import json

from environments.base import SandboxSession, ToolOutcome
from rollstream.v1 import events_pb2

PYTHON_TOOL = events_pb2.ToolSpec(
    name="python",
    description="Runs a Python script in a sandbox and returns what it prints.",
    parameters_json=json.dumps(
        {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The script."}},
            "required": ["code"],
        }
    ),
)
_STATUS = {
    "timeout": events_pb2.TOOL_STATUS_TIMEOUT,
    "exited": events_pb2.TOOL_STATUS_OK,
}


async def call_python(
    session: SandboxSession | None, call: events_pb2.ToolCall, *, timeout_s: float
) -> ToolOutcome:
    """Run the call's ``code``; what it printed, errors after output, is shown to the policy."""
    code = json.loads(call.arguments_json).get("code")
    if not isinstance(code, str) or not _is_text(code):
        return ToolOutcome(
            content="error: the argument 'code' is missing or not text",
            status=events_pb2.TOOL_STATUS_INVALID,
        )
    assert session is not None, "a task with this tool has a sandbox"
    result = await session.run_python(code, timeout_s=timeout_s)
    text = (result.stdout + result.stderr).decode("utf-8", "replace")
    status = _STATUS.get(result.reason, events_pb2.TOOL_STATUS_FAILED)
    if result.exit_code and status == events_pb2.TOOL_STATUS_OK:
        status = events_pb2.TOOL_STATUS_FAILED
    if result.reason != "exited":
        text += f"\n[{result.reason}]"
    return ToolOutcome(
        content=text,
        status=status,
        exit_code=result.exit_code,
        dropped_bytes=result.dropped_bytes,
    )


def _is_text(code: str) -> bool:
    """Whether it can be written down: JSON escapes can spell half a character."""
    try:
        code.encode()
    except UnicodeEncodeError:
        return False
    return True
