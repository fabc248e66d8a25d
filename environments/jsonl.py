"""Tasks from a JSONL file: one JSON object a line.

Fields: ``prompt`` (text) or ``messages`` ([{role, content}]); ``answer`` (text or number) or
``check`` (Python run in the sandbox after the rollout, with the final answer in the file
``answer.txt``; exit status 0 is correct); ``files`` ({path: text}, put into the sandbox at the
start); ``difficulty``. A line that is none of this is a ``RejectedTask``: it becomes a dead letter
and the others go on.

The verifier compares the last assistant text with ``answer``: as numbers within ``tolerance`` when
both are numbers, else as text without surrounding space.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from environments.base import (
    Environment,
    RejectedTask,
    SandboxSession,
    TaskSpec,
    ToolOutcome,
)
from environments.python_tool import PYTHON_TOOL, call_python
from rollstream.codecs import text_message, text_of
from rollstream.errors import ConfigError, ContractError
from rollstream.v1 import events_pb2

_HELD_OUT_SHARE = 8
_MAX_LINE_BYTES = 16 << 20
_CHECK_TIMEOUT_S = 20.0


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user"]
    content: str


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prompt: str | None = None
    messages: list[_Message] = Field(default_factory=list)
    answer: str | int | float | None = None
    check: str | None = None
    files: dict[str, str] = Field(default_factory=dict)
    difficulty: float = Field(default=0.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _complete(self) -> _Line:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give either prompt or messages")
        if (self.answer is None) == (self.check is None):
            raise ValueError("give either answer or check")
        return self


class JsonlEnvironment(Environment):
    """A file of tasks. ``held_out``: a second file; without it one line in eight is held out."""

    def __init__(
        self, *, path: str, held_out: str = "", tool: bool = False, tolerance: float = 1e-6
    ) -> None:
        """``tool``: offer the sandboxed Python tool. ``ConfigError`` when a file is missing."""
        for file in filter(None, (path, held_out)):
            if not Path(file).is_file():
                raise ConfigError(f"task file {file!r} does not exist", hint="check options.path")
        self._path, self._held_out = Path(path), Path(held_out) if held_out else None
        self._tool, self._tolerance = tool, tolerance

    @property
    def source(self) -> str:
        digest = hashlib.sha256(self._path.read_bytes()).hexdigest()[:12]
        return f"jsonl/{self._path.name}/{digest}"

    @property
    def toolchain(self) -> str:
        return "python"

    @property
    def verifies_in_sandbox(self) -> bool:
        return True

    @property
    def tools(self) -> Sequence[events_pb2.ToolSpec]:
        return (PYTHON_TOOL,) if self._tool else ()

    def tasks(self, *, seed: int, split: str, start: int = 0) -> Iterator[TaskSpec | RejectedTask]:
        held_out = split != "train"
        file = self._held_out if held_out and self._held_out else self._path
        with file.open("rb") as lines:
            index = 0
            for number, raw in enumerate(lines, start=1):
                if not raw.strip() or not self._belongs(raw, held_out=held_out):
                    continue
                if index >= start:
                    yield self._task(file, number, raw)
                index += 1

    def _belongs(self, raw: bytes, *, held_out: bool) -> bool:
        if self._held_out is not None:
            return True
        return (hashlib.blake2b(raw.strip()).digest()[0] % _HELD_OUT_SHARE == 0) == held_out

    def _task(self, file: Path, number: int, raw: bytes) -> TaskSpec | RejectedTask:
        try:
            if len(raw) > _MAX_LINE_BYTES:
                raise ValueError(f"{len(raw)} bytes are more than {_MAX_LINE_BYTES}")
            line = _Line.model_validate_json(raw)
        except (ValidationError, ValueError) as error:
            problem = (
                "; ".join(_problem(e) for e in error.errors())
                if isinstance(error, ValidationError)
                else str(error)
            )
            return RejectedTask(
                where=str(file),
                position=number,
                raw=raw,
                error=ContractError(
                    f"{file}, line {number}: {problem}",
                    hint="fields: prompt or messages, answer or check, files, difficulty",
                ),
            )
        return TaskSpec(
            prompt=_prompt(line),
            verifier={"answer": line.answer, "check": line.check},
            sandbox_files={path: text.encode() for path, text in line.files.items()},
            difficulty=line.difficulty,
        )

    async def call_tool(
        self, session: SandboxSession | None, call: events_pb2.ToolCall, *, timeout_s: float
    ) -> ToolOutcome:
        return await call_python(session, call, timeout_s=timeout_s)

    async def verify(
        self,
        session: SandboxSession | None,
        verifier: Mapping[str, Any],
        turns: Sequence[events_pb2.Turn],
    ) -> events_pb2.Evidence:
        said = text_of(turns[-1].assistant).strip() if turns else ""
        if verifier.get("check"):
            return await _run_check(session, str(verifier["check"]), said)
        correct = _same(said, str(verifier["answer"]).strip(), self._tolerance)
        return _evidence(correct=correct)


def _problem(detail: Any) -> str:
    where = ".".join(map(str, detail["loc"]))
    return f"{where}: {detail['msg']}" if where else str(detail["msg"])


def _prompt(line: _Line) -> tuple[events_pb2.Message, ...]:
    if line.prompt is not None:
        return (text_message(events_pb2.ROLE_USER, line.prompt),)
    roles = {"system": events_pb2.ROLE_SYSTEM, "user": events_pb2.ROLE_USER}
    return tuple(text_message(roles[m.role], m.content) for m in line.messages)


async def _run_check(session: SandboxSession | None, check: str, said: str) -> events_pb2.Evidence:
    assert session is not None, "this environment has a toolchain"
    await session.put_files({"answer.txt": said.encode()})
    result = await session.run_python(check, timeout_s=_CHECK_TIMEOUT_S)
    detail = json.dumps({"stderr": result.stderr.decode("utf-8", "replace")[-1000:]})
    return _evidence(correct=result.reason == "exited" and result.exit_code == 0, detail=detail)


def _evidence(*, correct: bool, detail: str = "") -> events_pb2.Evidence:
    return events_pb2.Evidence(
        validity=events_pb2.VALIDITY_VALID,
        items=[events_pb2.EvidenceItem(name="correct", value=float(correct), detail=detail)],
    )


def _same(said: str, answer: str, tolerance: float) -> bool:
    if said == answer:
        return True
    try:
        return math.isclose(float(said), float(answer), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False
