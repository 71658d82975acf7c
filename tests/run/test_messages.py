"""Messages between processes survive JSON, with their descriptors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from nbtoolkit.run.events import Event, NoteAdded
from nbtoolkit.wire import messages
from nbtoolkit.wire.messages import Message, decode, encode
from nbtoolkit.wire.transport import Connection, GroupDescriptors

# What a field of a type may hold.
VALUES: dict[Any, tuple[Any, ...]] = {
    str: ("a text\nof two lines, é",),
    bool: (True, False),
    int: (0, 7),
    float: (0.25, float("inf")),
    int | None: (None, 7),
    float | None: (None, 0.25),
    str | None: (None, "x"),
    list[str]: ([], ["a", "b"]),
    list[int]: ([], [1, 2]),
    dict[str, float]: ({}, {"type": 0.5, "loss": 1.0}),
    dict[str, int]: ({}, {"0": -9}),
    dict[str, str]: ({}, {"PATH": "/bin"}),
    list[list[float]] | None: (None, [[0.5], []]),
}


def leaves(kind: type[Message]) -> Iterator[type[Message]]:
    """The types of messages that are sent."""
    if not kind.__subclasses__():
        yield kind
    for one in kind.__subclasses__():
        yield from leaves(one)


def examples(kind: type[Message]) -> list[Message]:
    """Two of a type: its fields' first values, and their last ones."""
    hints = get_type_hints(kind)
    chosen: list[dict[str, Any]] = [{}, {}]
    for field in fields(kind):
        hint = hints[field.name]
        values = VALUES.get(hint) or hint.__args__  # else a Literal
        chosen[0][field.name], chosen[1][field.name] = values[0], values[-1]
    return [kind(**one) for one in chosen]


# Events have tests of their own.
SENT = [one for one in leaves(Message) if not issubclass(one, Event)]


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    ours, far = Connection.pair()
    yield ours, far
    ours.close()
    far.close()


@pytest.mark.parametrize("kind", SENT, ids=lambda kind: kind.__name__)
def test_a_message_comes_back_as_it_was(kind: type[Message]) -> None:
    for message in examples(kind):
        fds: list[int] = []
        data = encode(message, fds)
        back = decode(data, fds)
        assert back == message
        assert type(back) is kind


@pytest.mark.parametrize("kind", SENT, ids=lambda kind: kind.__name__)
def test_a_message_is_frozen_and_has_names_for_its_fields(kind: type[Message]) -> None:
    assert is_dataclass(kind)
    message = examples(kind)[0]
    with pytest.raises(FrozenInstanceError):
        message.where = "elsewhere"  # type: ignore[attr-defined]
    if fields(kind):
        with pytest.raises(TypeError):
            kind("by position")


def test_values_that_json_does_not_know_are_texts() -> None:
    note = NoteAdded(text=Path("/tmp/x"), level="info")  # type: ignore[arg-type]
    assert decode(encode(note)) == NoteAdded(text="/tmp/x", level="info")


@pytest.mark.parametrize("name", ["Rumour", "object", None])
def test_an_unknown_type_is_named(name: str | None) -> None:
    data = b'{"type": "Rumour"}' if name == "Rumour" else b'{"type": "object"}'
    with pytest.raises(ValueError, match=rf"type {name!r}"):
        decode(b"{}" if name is None else data)


def test_the_ends_of_a_group_come_back_from_a_list() -> None:
    ends = GroupDescriptors(agent=13, connections=[14, 15], telemetry=[16, 17])
    assert ends.numbers() == [13, 14, 15, 16, 17]
    assert GroupDescriptors.of(ends.numbers()) == ends


@pytest.mark.parametrize("size", [10, 70_000, 3_000_000])
def test_a_message_of_any_size_arrives_with_its_descriptors(
    pair: tuple[Connection, Connection], size: int
) -> None:
    ours, far = pair
    read, write = os.pipe()
    assert ours.send(messages.Fork(main="m" * size, group=True, descriptors=[write]))
    got = far.receive(timeout=1.0)
    assert isinstance(got, messages.Fork)
    assert got.main == "m" * size
    os.write(got.descriptors[0], b"open")
    assert os.read(read, 99) == b"open"
    for fd in (read, write, *got.descriptors):
        os.close(fd)


def test_programs_do_not_inherit_the_descriptors_of_a_message(
    pair: tuple[Connection, Connection],
) -> None:
    ours, far = pair
    assert ours.send(messages.Fork(main="", group=False, descriptors=[0]))
    (got,) = far.drain()
    assert isinstance(got, messages.Fork)
    assert not os.get_inheritable(got.descriptors[0])
    os.close(got.descriptors[0])


def test_a_message_is_dropped_where_there_is_no_room_and_waiting_is_not_wanted(
    pair: tuple[Connection, Connection],
) -> None:
    ours, far = pair
    for count in range(10_000):
        ours.send_nowait(messages.CollectivesStarted(count=count))
    received = far.drain()
    assert 0 < len(received) < 10_000
    assert received[-1] == messages.CollectivesStarted(count=len(received) - 1)


def test_a_line_keeps_the_order_of_messages(pair: tuple[Connection, Connection]) -> None:
    supervisor, rank = pair
    kinds = [
        *leaves(messages.Question),
        *(one for one in SENT if issubclass(one, messages.Statement)),
    ]
    said: list[Message] = [one for kind in kinds for one in examples(kind)]
    for one in said:
        assert rank.send(one)
    rank.close()
    assert supervisor.drain() == said
    assert supervisor.receive() is None
