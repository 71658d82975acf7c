"""Messages between processes survive JSON, with their descriptors by name."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from nbtoolkit.run import messages
from nbtoolkit.run.events import Event, NoteAdded
from nbtoolkit.run.messages import Descriptors, GroupDescriptors, Message, decode, encode
from nbtoolkit.run.transport import (
    Connection,
    GroupConnections,
    packet_pair,
    receive_packet,
    send_packet,
)

GROUP = GroupDescriptors(agent=13, connections=[14, 15], telemetry=[16, 17])

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
    dict[str, str]: ({"PATH": "/bin", "LANG": "\udcff"},),
    dict[str, str] | None: (None, {"PATH": "/bin"}),
    list[list[float]] | None: (None, [[0.5], []]),
    GroupDescriptors: (GROUP,),
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
        if isinstance(hint, type) and issubclass(hint, Descriptors):
            values: tuple[Any, ...] = tuple(examples(hint))
        else:
            values = VALUES.get(hint) or hint.__args__  # else a Literal
        chosen[0][field.name], chosen[1][field.name] = values[0], values[-1]
    return [kind(**one) for one in chosen]


# Events have tests of their own.
SENT = [one for one in leaves(Message) if not issubclass(one, (Descriptors, Event))]


@pytest.mark.parametrize("kind", SENT, ids=lambda kind: kind.__name__)
def test_a_message_comes_back_as_it_was(kind: type[Message]) -> None:
    for message in examples(kind):
        fds: list[int] = []
        data = encode(message, fds)
        assert b"\n" not in data
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


def test_descriptors_are_rebuilt_by_name() -> None:
    given = messages.AgentDescriptors(payload=11, spec=12, group=GROUP)
    message = messages.ForkAgent(ticket=1, port=2, environment="e", patient=True, descriptors=given)
    fds: list[int] = []
    data = encode(message, fds)
    assert fds == [11, 12, 13, 14, 15, 16, 17] == given.numbers()
    back = decode(data, [fd + 100 for fd in fds])
    assert isinstance(back, messages.ForkAgent)
    assert back.descriptors == messages.AgentDescriptors(
        payload=111,
        spec=112,
        group=GroupDescriptors(agent=113, connections=[114, 115], telemetry=[116, 117]),
    )


def test_a_packet_carries_open_descriptors_under_their_names() -> None:
    ours, theirs = packet_pair()
    read, write = os.pipe()
    mine, other = GroupConnections.pair(2)
    given = messages.AgentDescriptors(payload=read, spec=write, group=other.descriptors)
    packet = messages.ForkAgent(ticket=1, port=2, environment="", patient=False, descriptors=given)
    with ours, theirs:
        assert send_packet(ours, packet)
        got = receive_packet(theirs)
    assert isinstance(got, messages.ForkAgent)
    os.close(read)
    other.close()
    os.write(got.descriptors.spec, b"to the payload")
    assert os.read(got.descriptors.payload, 99) == b"to the payload"
    group = got.descriptors.group
    pairs = [(mine.agent, group.agent)]
    pairs += zip(mine.connections, group.connections, strict=True)
    pairs += zip(mine.telemetry, group.telemetry, strict=True)
    for number, (here, fd) in enumerate(pairs):
        far = Connection(socket.socket(fileno=fd))
        here.send(messages.CollectivesStarted(count=number))
        assert far.receive(timeout=1.0) == messages.CollectivesStarted(count=number)
        far.close()
    for fd in (write, got.descriptors.payload, got.descriptors.spec):
        os.close(fd)
    mine.close()


def test_a_line_keeps_the_order_of_messages() -> None:
    supervisor, rank = Connection.pair()
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
    supervisor.close()
