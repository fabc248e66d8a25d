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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from rollstream.chat_template import ChatTemplate, plain_message, plain_tools, read_settings
from rollstream.errors import ConfigError, ContractError
from rollstream.v1 import events_pb2

IntArray = npt.NDArray[np.int32]

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
        """Read the folder.

        ``ConfigError`` when it holds no tokenizer or no chat template, or one that cannot be used.
        """
        self._tokenizer = _read_tokenizer(model_dir)
        settings = read_settings(model_dir)
        self._template = ChatTemplate(model_dir, settings)
        self._syntax = _tool_syntax(model_dir, settings)
        opened, closed = re.escape(self._syntax.open), re.escape(self._syntax.close)
        self._calls = re.compile(f"{opened}(.*?){closed}", re.DOTALL)
        added = self._tokenizer.get_added_tokens_decoder().values()
        texts = sorted((token.content for token in added), key=len, reverse=True)
        try:
            self._end = self._end_of_turn(texts)
        except ContractError as error:
            raise ConfigError(f"{model_dir}: {error.message}", hint=error.hint) from error
        special = self._template.special
        ends = [self._tokenizer.token_to_id(t) for t in (self._end, special.get("eos_token")) if t]
        self.stop_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
        if not self.stop_ids:
            raise ConfigError(
                f"{model_dir}: no eos_token, and the chat template closes no turn",
                hint="name eos_token in tokenizer_config.json",
            )
        pad = self._tokenizer.token_to_id(special.get("pad_token", ""))
        self.pad_id = self.stop_ids[0] if pad is None else int(pad)
        self.vocab_size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        # What structures a conversation: special tokens, and any other token the template writes.
        written = "".join(self._template.sources.values())
        guarded = {token.content for token in added if token.special or token.content in written}
        self._guarded = [t for t in texts if t in guarded and len(t.strip()) > 1]

    def render_prompt(
        self, messages: Sequence[events_pb2.Message], tools: Sequence[events_pb2.ToolSpec]
    ) -> IntArray:
        """Ids of the conversation so far, up to and with the opening of the assistant's turn."""
        plain = [plain_message(message) for message in messages]
        return self._encode(self._template.render(plain, plain_tools(tools), opening=True))

    def render_continuation(
        self, results: Sequence[events_pb2.Message], *, closed: bool
    ) -> IntArray:
        """Ids to append after a sampled assistant message.

        Its closing (unless ``closed`` by a sampled stop id), the tool messages, and the opening of
        the next assistant turn.
        """
        said = {"role": "assistant", "content": _MARK}
        talk = [_ANY_USER, said, *map(plain_message, results)]
        tail = _after_mark(self._template.render(talk, opening=True, with_tools=bool(results)))
        if closed and self._end:
            tail = tail.lstrip().removeprefix(self._end)
        return self._encode(tail)

    def parse_assistant(self, token_ids: IntArray, *, turn: int) -> events_pb2.Message:
        """The sampled ids as a message: text, and tool calls in the model's own syntax.

        Tool call ids are ``call-<turn>-<k>``. A call that is opened and not closed is text.
        """
        body = token_ids[:-1] if len(token_ids) and token_ids[-1] in self.stop_ids else token_ids
        text = self.decode(body)
        found = self._calls.findall(text)
        calls = [self._call(one, f"call-{turn}-{k}") for k, one in enumerate(found)]
        left = self._calls.sub("", text).strip() if calls else text
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
            said = self._assistant_ids(messages[position], with_tools=bool(tools))
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
        for special in self._guarded:
            if special in text:
                text = text.replace(special, special[0] + " " + special[1:])
        return text

    def _assistant_ids(self, message: events_pb2.Message, *, with_tools: bool) -> IntArray:
        """What the model would have sampled to say ``message``: its text and the closing token."""
        render = self._template.render
        opening = render([_ANY_USER], opening=True, with_tools=with_tools)
        talk = [_ANY_USER, plain_message(message)]
        whole = render(talk, opening=False, with_tools=with_tools)
        if not whole.startswith(opening):
            raise ContractError(
                "the chat template renders an assistant turn unlike its opening",
                hint="this model cannot be warmed up on demonstrations",
            )
        body = whole[len(opening) :]
        if not self._end:
            return np.append(self._encode(body), np.int32(self.stop_ids[0]))
        end = body.rfind(self._end)
        return self._encode(body[: end + len(self._end)] if end >= 0 else body)

    def _call(self, found: str, call_id: str) -> events_pb2.ToolCall:
        if self._syntax.tool:
            arguments = json.dumps({self._syntax.argument: found})
            return events_pb2.ToolCall(id=call_id, name=self._syntax.tool, arguments_json=arguments)
        try:
            said = json.loads(found)
            name, arguments = str(said["name"]), said.get("arguments", {})
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            return events_pb2.ToolCall(id=call_id, name=name, arguments_json=text)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # Malformed: kept as written; the agent loop tells the policy what is wrong with it.
            return events_pb2.ToolCall(id=call_id, name="", arguments_json=found.strip())

    def _end_of_turn(self, texts: Sequence[str]) -> str:
        """Which of ``texts`` (longest first) the template writes after an assistant's message; ""
        for none.
        """
        talk = [_ANY_USER, {"role": "assistant", "content": _MARK}]
        tail = _after_mark(self._template.render(talk, opening=False)).lstrip()
        return next((text for text in texts if tail.startswith(text)), "")

    def _encode(self, text: str) -> IntArray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)


def _read_tokenizer(model_dir: Path) -> Tokenizer:
    path = model_dir / "tokenizer.json"
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist", hint="a policy folder needs the tokenizers library's file"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"{path} cannot be read: {error}", hint="fetch the model again"
        ) from error
    # Some files carry the settings of their training: text must neither be cut nor filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _tool_syntax(model_dir: Path, settings: Mapping[str, Any]) -> ToolSyntax:
    """The syntax that the folder asks for; ``ConfigError`` when that is none."""
    given = settings.get("rollstream_tool_syntax", {})
    known = asdict(ToolSyntax())
    if isinstance(given, dict) and all(isinstance(given.get(k, ""), str) for k in known):
        syntax = ToolSyntax(**{k: v for k, v in given.items() if k in known})
        complete = syntax.open and syntax.close and bool(syntax.tool) == bool(syntax.argument)
        if complete and set(given) <= set(known):
            return syntax
    raise ConfigError(
        f"{model_dir}/tokenizer_config.json: rollstream_tool_syntax is {given!r}",
        hint=f"an object with {', '.join(known)}: texts; tool and argument both or neither",
    )


def _after_mark(text: str) -> str:
    """What follows the marked message in a rendered conversation."""
    _, mark, tail = text.rpartition(_MARK)
    if not mark:
        raise ContractError(
            "the chat template does not show what an assistant said",
            hint="a template that drops earlier turns cannot be continued token for token",
        )
    return tail


def _index_of_assistant(messages: Sequence[events_pb2.Message]) -> int:
    for position, message in enumerate(messages):
        if message.role == events_pb2.ROLE_ASSISTANT:
            return position
    raise ContractError("a demonstration without an assistant message teaches nothing")
