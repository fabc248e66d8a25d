"""Example events with every field set, and their recorded binaries."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

from rollstream import codecs
from rollstream.topics import ALL, Topic

FOLDER = Path(__file__).parent / "messages"


def path_of(topic: Topic) -> Path:
    return FOLDER / f"{topic.name}.bin"


def example(topic: Topic) -> Message:
    """A message of the topic in which every field has a value, the same each time."""
    message = topic.message()
    _fill(message, depth=0)
    message.header.schema_version = 1  # type: ignore[attr-defined]
    _make_sound(message)
    return message


def _fill(message: Message, *, depth: int) -> None:
    if depth > 5:
        return
    for number, field in enumerate(message.DESCRIPTOR.fields, start=1):
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.containing_oneof is not None and field.containing_oneof.fields[0] is not field:
            continue
        if is_map:
            _fill_map(message, field, number)
        elif field.message_type is not None:
            below = getattr(message, field.name)
            _fill(below.add() if field.is_repeated else below, depth=depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).append(_value(field, number))
        else:
            setattr(message, field.name, _value(field, number))


def _fill_map(message: Message, field: Field, number: int) -> None:
    value = field.message_type.fields_by_name["value"]
    getattr(message, field.name)["key"] = _value(value, number)


def _value(field: Field, number: int) -> object:
    if field.type == Field.TYPE_STRING:
        return f"{field.name}-é"
    if field.type == Field.TYPE_BYTES:
        return bytes(range(4))
    if field.type == Field.TYPE_BOOL:
        return True
    if field.type in (Field.TYPE_DOUBLE, Field.TYPE_FLOAT):
        return number + 0.25
    if field.type == Field.TYPE_ENUM:
        return 1
    return number


def _make_sound(message: Message) -> None:
    """Token sequences have to be consistent to decode."""
    for sequence in codecs._sequences(message):
        sequence.token_ids = bytes(range(8))
        sequence.logprobs = b"\x00\x00\x00\xbf"
        del sequence.sampled[:], sequence.versions[:]
        sequence.sampled.add(start=1, length=1)
        sequence.versions.add(policy_version=7, start=1, length=1)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for topic in ALL:
        if not path_of(topic).exists():
            path_of(topic).write_bytes(codecs.encode(example(topic)))


if __name__ == "__main__":
    main()
