"""Chat formats without transformers: messages to token ids, sampled ids to a message.

Token-in, token-out: a prompt is rendered and tokenised once; after that only new environment text
is tokenised, and what was sampled is kept as it is. ``ChatFormat`` needs a folder in Hugging Face
layout (tokenizer.json, and tokenizer_config.json or chat_template.jinja) and only the packages
``tokenizers`` and ``jinja2``.

Tool call syntax: Hermes (``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``) unless
tokenizer_config.json says otherwise under ``rollstream_tool_syntax``:
``{"open": "<tool>", "close": "</tool>", "tool": "python", "argument": "code"}`` makes everything
between the tags the one argument of the one tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from rollstream.errors import ConfigError, ContractError
from rollstream.v1 import events_pb2

IntArray = npt.NDArray[np.int32]

_ROLES = {
    events_pb2.ROLE_SYSTEM: "system",
    events_pb2.ROLE_USER: "user",
    events_pb2.ROLE_ASSISTANT: "assistant",
    events_pb2.ROLE_TOOL: "tool",
}
# Stands for what the assistant said, to find where its text ends in a rendered conversation.
_MARK = "ROLLSTREAMMARK"
_ANY_USER = {"role": "user", "content": "u"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSyntax:
    """How the model writes a tool call. Empty ``tool``: Hermes JSON with the name inside."""

    open: str = "<tool_call>"
    close: str = "</tool_call>"
    tool: str = ""
    argument: str = ""


class ChatFormat:
    """The chat format of one model folder.

    Attributes:
        stop_ids: ids that end an assistant message (the end-of-sequence token and, if other, the
            template's end-of-turn token).
        pad_id: id for padding.
        vocab_size: number of ids.
    """

    def __init__(self, model_dir: Path) -> None:
        """Read the folder. ``ConfigError`` when it holds no tokenizer or no chat template."""
        self._tokenizer = _read_tokenizer(model_dir)
        settings = _read_settings(model_dir)
        self._template = _compile(model_dir, settings)
        self._special = {name: _text(settings.get(name)) for name in ("bos_token", "eos_token")}
        self._syntax = ToolSyntax(**settings.get("rollstream_tool_syntax", {}))
        self._special_texts = sorted(
            (t.content for t in self._tokenizer.get_added_tokens_decoder().values()),
            key=len,
            reverse=True,
        )
        self._end = self._end_of_turn()
        eos = self._special["eos_token"]
        ends = [self._tokenizer.token_to_id(text) for text in (self._end, eos) if text]
        self.stop_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
        if not self.stop_ids:
            raise ConfigError(f"{model_dir}: no eos_token, and the chat template closes no turn")
        pad = self._tokenizer.token_to_id(_text(settings.get("pad_token")) or "")
        self.pad_id = self.stop_ids[0] if pad is None else int(pad)
        self.vocab_size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def render_prompt(
        self, messages: Sequence[events_pb2.Message], tools: Sequence[events_pb2.ToolSpec]
    ) -> IntArray:
        """Ids of the conversation so far, up to and with the opening of the assistant's turn."""
        return self._encode(self._render([_plain(m) for m in messages], _plain_tools(tools)))

    def render_continuation(
        self, results: Sequence[events_pb2.Message], *, closed: bool
    ) -> IntArray:
        """Ids to append after a sampled assistant message.

        Its closing (unless ``closed`` by a sampled stop id), the tool messages, and the opening of
        the next assistant turn.
        """
        said = {"role": "assistant", "content": _MARK}
        text = self._render([_ANY_USER, said, *map(_plain, results)], None)
        tail = text[text.index(_MARK) + len(_MARK) :]
        if closed and self._end:
            tail = tail.lstrip().removeprefix(self._end)
        return self._encode(tail)

    def parse_assistant(self, token_ids: IntArray, *, turn: int) -> events_pb2.Message:
        """The sampled ids as a message: text, and tool calls in the model's own syntax.

        Tool call ids are ``call-<turn>-<k>``. A call that is opened and not closed is text.
        """
        body = token_ids[:-1] if len(token_ids) and token_ids[-1] in self.stop_ids else token_ids
        text = self.decode(body)
        syntax = self._syntax
        pattern = re.compile(re.escape(syntax.open) + "(.*?)" + re.escape(syntax.close), re.DOTALL)
        calls = [
            self._call(found, f"call-{turn}-{k}") for k, found in enumerate(pattern.findall(text))
        ]
        left = pattern.sub("", text).strip() if calls else text
        content = [events_pb2.ContentPart(text=left)] if left else []
        return events_pb2.Message(role=events_pb2.ROLE_ASSISTANT, content=content, tool_calls=calls)

    def encode_demonstration(
        self, messages: Sequence[events_pb2.Message], tools: Sequence[events_pb2.ToolSpec] = ()
    ) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """A whole conversation as ids, and the mask of what the assistant wrote, closing included.

        Token for token what a rollout of the same messages would hold.
        """
        first = _index_of_assistant(messages)
        parts = [self.render_prompt(messages[:first], tools)]
        masks = [np.zeros(len(parts[0]), dtype=np.bool_)]
        position = first
        while position < len(messages):
            said = self._assistant_ids(messages[position])
            parts.append(said)
            masks.append(np.ones(len(said), dtype=np.bool_))
            after = position + 1
            while after < len(messages) and messages[after].role != events_pb2.ROLE_ASSISTANT:
                after += 1
            if after < len(messages):
                shown = self.render_continuation(messages[position + 1 : after], closed=True)
                parts.append(shown)
                masks.append(np.zeros(len(shown), dtype=np.bool_))
            position = after
        return np.concatenate(parts), np.concatenate(masks)

    def decode(self, token_ids: IntArray) -> str:
        """Text with special tokens kept."""
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False))

    def neutralise(self, text: str) -> str:
        """``text`` in which no special token can be read: what tools print must not end a turn."""
        for special in self._special_texts:
            if special in text:
                text = text.replace(special, special[0] + " " + special[1:])
        return text

    def _assistant_ids(self, message: events_pb2.Message) -> IntArray:
        """What the model would have sampled to say ``message``: its text and the closing token."""
        opening = self._render([_ANY_USER], None)
        whole = self._render([_ANY_USER, _plain(message)], None, opening=False)
        if not whole.startswith(opening):
            raise ContractError("the chat template renders an assistant turn unlike its opening")
        body = whole[len(opening) :]
        end = body.rfind(self._end)
        return self._encode(body[: end + len(self._end)] if end >= 0 else body)

    def _call(self, found: str, call_id: str) -> events_pb2.ToolCall:
        if self._syntax.tool:
            arguments = json.dumps({self._syntax.argument: found})
            return events_pb2.ToolCall(id=call_id, name=self._syntax.tool, arguments_json=arguments)
        try:
            said = json.loads(found)
            name, arguments = str(said["name"]), said.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # Malformed: kept as written; the agent loop tells the policy what is wrong with it.
            return events_pb2.ToolCall(id=call_id, name="", arguments_json=found.strip())
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return events_pb2.ToolCall(id=call_id, name=name, arguments_json=text)

    def _end_of_turn(self) -> str:
        """The special token that the template writes after an assistant's text; "" for none."""
        text = self._render(
            [_ANY_USER, {"role": "assistant", "content": _MARK}], None, opening=False
        )
        tail = text[text.index(_MARK) + len(_MARK) :].lstrip()
        return next((t for t in self._special_texts if tail.startswith(t)), "")

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        opening: bool = True,
    ) -> str:
        try:
            return str(
                self._template.render(
                    messages=messages, tools=tools, add_generation_prompt=opening, **self._special
                )
            )
        except TemplateError as error:
            raise ContractError(f"the chat template refuses the conversation: {error}") from error

    def _encode(self, text: str) -> IntArray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)


def _read_tokenizer(model_dir: Path) -> Tokenizer:
    path = model_dir / "tokenizer.json"
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist", hint="a policy folder needs the tokenizers library's file"
        )
    return Tokenizer.from_file(str(path))


def _read_settings(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return settings


def _compile(model_dir: Path, settings: Mapping[str, Any]) -> Any:
    file = model_dir / "chat_template.jinja"
    source = file.read_text("utf-8") if file.exists() else settings.get("chat_template")
    if not isinstance(source, str):
        raise ConfigError(
            f"{model_dir} has no chat template",
            hint="add chat_template.jinja, or chat_template in tokenizer_config.json",
        )
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(f"{model_dir}: broken chat template: {error}") from error


def _raise(message: str) -> None:
    raise TemplateError(message)


def _text(token: Any) -> str:
    """The text of a token, which tokenizer_config.json writes as a string or as an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _plain(message: events_pb2.Message) -> dict[str, Any]:
    text = "".join(part.text for part in message.content)
    plain: dict[str, Any] = {"role": _ROLES[message.role], "content": text}
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": c.name, "arguments": json.loads(c.arguments_json)},
            }
            for c in message.tool_calls
        ]
    if message.name:
        plain["name"] = message.name
    return plain


def _plain_tools(tools: Sequence[events_pb2.ToolSpec]) -> list[dict[str, Any]] | None:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": json.loads(tool.parameters_json or "{}"),
            },
        }
        for tool in tools
    ] or None


def _index_of_assistant(messages: Sequence[events_pb2.Message]) -> int:
    for position, message in enumerate(messages):
        if message.role == events_pb2.ROLE_ASSISTANT:
            return position
    raise ContractError("a demonstration without an assistant message teaches nothing")
