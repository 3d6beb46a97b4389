"""TensorBoard event files, read without the code that writes them."""

import pathlib
import struct

from tensorboardX.proto.event_pb2 import Event


def events_of(workdir: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> [(step, value)], of all event files of a run, in their order."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((workdir / 'tensorboard').iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from('<Q', data, at)  # then its checksum, the event, a checksum
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found
