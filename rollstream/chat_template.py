"""The chat template of a model folder, rendered as transformers renders it.

Owns the jinja environment (sandboxed: a template is code that came with somebody's weights) and the
form in which messages and tools reach a template. A folder that cannot be read is a ``ConfigError``
that names the file; a conversation that the template refuses is a ``ContractError``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollstream.errors import ConfigError, ContractError
from rollstream.v1 import events_pb2

_ROLES = {
    events_pb2.ROLE_SYSTEM: "system",
    events_pb2.ROLE_USER: "user",
    events_pb2.ROLE_ASSISTANT: "assistant",
    events_pb2.ROLE_TOOL: "tool",
}
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# A template runs Python operations on what it is given: these come out of it beside jinja's errors.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class ChatTemplate:
    """The template of one folder.

    Attributes:
        special: text of each special token that the folder names ("eos_token", ...).
        sources: the template's text; some folders have a second one for conversations with tools.
    """

    def __init__(self, model_dir: Path, settings: Mapping[str, Any]) -> None:
        """``settings``: tokenizer_config.json. ``ConfigError``: no template, or a broken one."""
        self.special = _special_tokens(model_dir, settings)
        self.sources = _sources(model_dir, settings)
        environment = _environment()
        try:
            self._compiled = {n: environment.from_string(s) for n, s in self.sources.items()}
        except TemplateError as error:
            raise ConfigError(f"{model_dir}: broken chat template: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        opening: bool,
        with_tools: bool = False,
    ) -> str:
        """The conversation as text; ``opening``: with the beginning of an assistant's turn.

        ``with_tools``: there are tools, though the template need not list them here.

        Raises:
            ContractError: the template refuses the conversation.
        """
        named = "tool_use" if (tools or with_tools) and "tool_use" in self._compiled else "default"
        try:
            return str(
                self._compiled[named].render(
                    messages=messages,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=opening,
                    **self.special,
                )
            )
        except _REFUSALS as error:
            raise ContractError(
                f"the chat template refuses a conversation of {[m['role'] for m in messages]}:"
                f" {error}",
                hint="are these roles and tools in what the model was trained on?",
            ) from error


def read_settings(model_dir: Path) -> dict[str, Any]:
    """tokenizer_config.json, or nothing where there is none."""
    return _read_json(model_dir / "tokenizer_config.json")


def plain_message(message: events_pb2.Message) -> dict[str, Any]:
    """A message as templates expect it.

    Raises:
        ContractError: it has no role, an image (no text template can show one), or a tool call
            whose arguments are not JSON.
    """
    if message.role not in _ROLES:
        raise ContractError(f"a chat message has no known role ({message.role})")
    if any(part.WhichOneof("part") == "image" for part in message.content):
        raise ContractError(
            f"a message of the {_ROLES[message.role]} holds an image",
            hint="chat formats are text only: give the policy a description of it",
        )
    text = "".join(part.text for part in message.content)
    plain: dict[str, Any] = {"role": _ROLES[message.role], "content": text}
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    for key in ("name", "tool_call_id"):
        if value := getattr(message, key):
            plain[key] = value
    return plain


def plain_tools(tools: Sequence[events_pb2.ToolSpec]) -> list[dict[str, Any]] | None:
    """Tools as templates expect them (OpenAI's form), or None for none."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": _json(tool.parameters_json or "{}", f"schema of tool {tool.name!r}"),
            },
        }
        for tool in tools
    ] or None


def _plain_call(call: events_pb2.ToolCall) -> dict[str, Any]:
    arguments = _json(call.arguments_json or "{}", f"arguments of a call of {call.name!r}")
    plain: dict[str, Any] = {
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }
    return {"id": call.id, **plain} if call.id else plain


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{what} are not JSON: {text[:200]!r} ({error})") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", hint="fetch the model again"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no JSON object", hint="fetch the model again")
    return found


def _special_tokens(model_dir: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens; older folders keep them in a file of their own."""
    found = {**_read_json(model_dir / "special_tokens_map.json"), **settings}
    texts = {name: _text(found.get(name)) for name in _SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text}


def _text(token: Any) -> str:
    """The text of a token, which is written as a string or as an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _sources(model_dir: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    file = model_dir / "chat_template.jinja"
    source = file.read_text("utf-8") if file.exists() else settings.get("chat_template")
    if isinstance(source, str):
        return {"default": source}
    if isinstance(source, list):
        named = {str(one.get("name")): str(one.get("template")) for one in source}
        if "default" in named:
            return named
    raise ConfigError(
        f"{model_dir} has no chat template",
        hint="add chat_template.jinja, or chat_template in tokenizer_config.json",
    )


class _Generation(Extension):
    """``{% generation %}``: marks what the assistant says; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers offers a template, and nothing else."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
