"""Tasks from a JSONL file: one JSON object a line.

Fields: ``prompt`` (text) or ``messages`` ([{role, content}]); ``answer`` (text or number) or
``check`` (Python run in the sandbox after the rollout, with the final answer in the file
``answer.txt``; exit status 0 is correct); ``files`` ({path: text}, put into the sandbox at the
start); ``difficulty``. A line that is none of this is a ``RejectedTask``: it becomes a dead letter
and the others go on.

The verifier compares the last assistant text with ``answer``: whole numbers exactly, other numbers
within ``tolerance``, anything else as text without surrounding space.

The file must not change during a run: it is read again for each epoch, and its digest is part of
every task id.
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
    final_answer,
)
from environments.python_tool import PYTHON_TOOL, call_python
from rollstream.codecs import text_message
from rollstream.errors import ConfigError, ContractError
from rollstream.v1 import events_pb2

_HELD_OUT_SHARE = 8
_MAX_LINE_BYTES = 16 << 20
_CHECK_TIMEOUT_S = 20.0
_ROLES = {
    "system": events_pb2.ROLE_SYSTEM,
    "user": events_pb2.ROLE_USER,
    "assistant": events_pb2.ROLE_ASSISTANT,
}


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    prompt: str | None = None
    messages: list[_Message] = Field(default_factory=list)
    answer: str | int | float | None = None
    check: str | None = None
    files: dict[str, str] = Field(default_factory=dict)
    difficulty: float = 0.0

    @model_validator(mode="before")
    @classmethod
    def _no_truth_value(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("answer"), bool):
            raise ValueError(f"answer: {given['answer']} is neither text nor number")
        return given

    @model_validator(mode="after")
    def _complete(self) -> _Line:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give either prompt or messages")
        if self.messages and self.messages[-1].role != "user":
            raise ValueError("messages: the last one must be the user's")
        if (self.answer is None) == (self.check is None):
            raise ValueError("give either answer or check")
        for path in self.files:
            if path.startswith("/") or ".." in Path(path).parts or not Path(path).name:
                raise ValueError(f"files: {path!r} is no path inside the work folder")
        return self


class JsonlEnvironment(Environment):
    """A file of tasks. ``held_out``: a second file; without it one line in eight is held out."""

    def __init__(
        self, *, path: str, held_out: str = "", tool: bool = False, tolerance: float = 1e-6
    ) -> None:
        """``tool``: offer the sandboxed Python tool. ``ConfigError`` when a file cannot be read."""
        if not 0 <= tolerance < math.inf:
            raise ConfigError(f"option tolerance = {tolerance}", hint="a number from 0 on")
        self._path, self._held_out = Path(path), Path(held_out) if held_out else None
        self._tool, self._tolerance = tool, tolerance
        files = [self._path, *([self._held_out] if self._held_out else [])]
        scans = [_scan(file) for file in files]
        digest = "-".join(scan for scan, _ in scans)
        self._source = f"jsonl/{self._path.name}/{digest}"
        self._checks = any(checks for _, checks in scans)

    @property
    def source(self) -> str:
        return self._source

    @property
    def toolchain(self) -> str:
        return "python" if self._tool or self._checks else ""

    @property
    def verifies_in_sandbox(self) -> bool:
        return self._checks

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
                    yield _task(file, number, raw)
                index += 1

    def _belongs(self, raw: bytes, *, held_out: bool) -> bool:
        if self._held_out is not None:
            return True
        chosen = hashlib.blake2b(raw.strip()).digest()[0] % _HELD_OUT_SHARE == 0
        # A line that is no task is always the producer's: only there it becomes a dead letter.
        if chosen and isinstance(_parse(raw), str):
            chosen = False
        return chosen == held_out

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
        said = final_answer(turns)
        if (check := verifier.get("check")) is not None:
            return await _run_check(session, str(check), said)
        return _evidence(correct=_same(said, str(verifier["answer"]).strip(), self._tolerance))


def _scan(file: Path) -> tuple[str, bool]:
    """A digest of the file, and whether any of its lines may have a check."""
    try:
        with file.open("rb") as lines:
            digest, checks = hashlib.sha256(), False
            for raw in lines:
                digest.update(raw)
                checks = checks or b'"check"' in raw
    except OSError as error:
        raise ConfigError(
            f"task file {str(file)!r} cannot be read: {error.strerror}", hint="check options.path"
        ) from error
    return digest.hexdigest()[:12], checks


def _parse(raw: bytes) -> _Line | str:
    """The line, or what is wrong with it."""
    if len(raw) > _MAX_LINE_BYTES:
        return f"{len(raw)} bytes are more than {_MAX_LINE_BYTES}"
    try:
        return _Line.model_validate_json(raw)
    except ValidationError as error:
        return "; ".join(_problem(e) for e in error.errors())


def _task(file: Path, number: int, raw: bytes) -> TaskSpec | RejectedTask:
    line = _parse(raw)
    if isinstance(line, str):
        return RejectedTask(
            where=str(file),
            position=number,
            raw=raw,
            error=ContractError(
                f"{file}, line {number}: {line}",
                hint="fields: prompt or messages, answer or check, files, difficulty",
            ),
        )
    return TaskSpec(
        prompt=_prompt(line),
        verifier={"answer": line.answer} if line.check is None else {"check": line.check},
        sandbox_files={path: text.encode() for path, text in line.files.items()},
        difficulty=line.difficulty,
    )


def _problem(detail: Any) -> str:
    where = ".".join(map(str, detail["loc"]))
    return f"{where}: {detail['msg']}" if where else str(detail["msg"])


def _prompt(line: _Line) -> tuple[events_pb2.Message, ...]:
    if line.prompt is not None:
        return (text_message(events_pb2.ROLE_USER, line.prompt),)
    return tuple(text_message(_ROLES[m.role], m.content) for m in line.messages)


async def _run_check(session: SandboxSession | None, check: str, said: str) -> events_pb2.Evidence:
    assert session is not None, "a file with checks has a toolchain"
    try:
        await session.put_files({"answer.txt": said.encode()})
    except ContractError as error:
        # The session is the policy's: it put something in the way, or filled the disk.
        return _evidence(correct=False, detail=error.message)
    result = await session.run_python(check, timeout_s=_CHECK_TIMEOUT_S)
    detail = json.dumps(
        {"reason": result.reason, "stderr": result.stderr.decode("utf-8", "replace")[-1000:]}
    )
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
        return int(said) == int(answer)
    except ValueError:
        pass
    try:
        one, other = float(said), float(answer)
    except ValueError:
        return False
    return math.isfinite(other) and math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
