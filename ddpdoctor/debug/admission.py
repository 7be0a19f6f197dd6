"""Who may come in: the user whose job this is, and root."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ddpdoctor.run.records.supervisor import DebugRecord
from ddpdoctor.system import peers


class Admission:
    """Decides on each connection of a run, before a byte of it is read.

    Args:
        unidentified: Let in at the TCP ports whose user cannot be determined, too.
        report: Takes a record for each user that is refused, once.
    """

    def __init__(self, unidentified: bool, report: Callable[[DebugRecord], None]) -> None:
        self._unidentified = unidentified
        self._report = report
        self._refused: set[int | None] = set()

    def admits(self, writer: asyncio.StreamWriter, place: str) -> bool:
        """Whether a connection is served.

        Args:
            writer: The connection.
            place: Where it comes in, for a person.
        """
        try:
            uid: int | None = peers.user(writer.get_extra_info("socket"))
            why = ""
        except peers.GoneError:
            return False
        except peers.UnknownPeerError as error:
            if self._unidentified:
                return True
            uid, why = None, str(error)
        if uid is not None and peers.is_trusted(uid):
            return True
        if uid not in self._refused:
            # Once: whoever is refused could fill the terminal with it.
            self._refused.add(uid)
            now = time.time_ns()
            self._report(DebugRecord(time=now, state="refused", uid=uid, why=why, door=place))
        return False
