"""Where the nodes could meet, when nobody said so, or when it was said with "localhost"."""

from __future__ import annotations

from ddpdoctor.preflight.command_lines import check_line, line_on_node_0
from ddpdoctor.preflight.protocol.addresses import own_host
from ddpdoctor.preflight.protocol.place import Seat
from ddpdoctor.preflight.situation import Situation


def meeting_point(place: Seat, situation: Situation) -> tuple[str, str]:
    """What to do about it, and the line to type."""
    nproc = situation.nproc
    if place.names:
        return (
            "Name the first node, the same on every node. Here:",
            check_line(place, nproc, host=place.names[0]),
        )
    if place.rank == 0:
        return (
            "Name this machine, the same on every node. Here:",
            check_line(place, nproc, host=own_host(situation)),
        )
    if place.rank is None:
        return (
            "Name one of the nodes and a free port of it, the same on every node. If it is to be "
            "this one, on all of them:",
            check_line(place, nproc, host=own_host(situation)),
        )
    return (
        "Name node 0 and a free port of it, the same on every node. On node 0 this starts the "
        "check:",
        line_on_node_0(place, nproc),
    )
