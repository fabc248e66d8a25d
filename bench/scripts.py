"""Scripts for the scripted engine: what a policy writes, without a model."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from environments.demo_arithmetic import DemoArithmetic
from rollouts.engines.base import GenerateRequest
from rollstream.chat import ChatFormat
from rollstream.codecs import text_message
from rollstream.v1 import events_pb2


@cache
def _turns() -> tuple[int, list[npt.NDArray[np.int32]]]:
    """The id that opens a tool message, and the three turns of a rollout with two calls."""
    with tempfile.TemporaryDirectory() as folder:
        for name, data in DemoArithmetic().tokenizer().items():
            Path(folder, name).write_bytes(data)
        chat = ChatFormat(Path(folder))
        tool = chat.render_continuation([text_message(events_pb2.ROLE_TOOL, "1")], closed=True)[0]

        def turn(message: events_pb2.Message) -> npt.NDArray[np.int32]:
            user = text_message(events_pb2.ROLE_USER, "1")
            ids, mask = chat.encode_demonstration([user, message])
            return ids[mask]

        def call(code: str) -> events_pb2.Message:
            arguments = f'{{"code": "{code}"}}'
            return events_pb2.Message(
                role=events_pb2.ROLE_ASSISTANT,
                tool_calls=[events_pb2.ToolCall(name="python", arguments_json=arguments)],
            )

        answer = text_message(events_pb2.ROLE_ASSISTANT, "281")
        return int(tool), [turn(call("print(37*8)")), turn(call("print(296-15)")), turn(answer)]


def two_calls(request: GenerateRequest) -> npt.NDArray[np.int32]:
    """Calls the tool twice, then answers."""
    tool, turns = _turns()
    return turns[min(2, int((request.prompt_ids == tool).sum()))]
