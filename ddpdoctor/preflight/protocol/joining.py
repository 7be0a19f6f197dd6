"""A node calls the coordinator until it is there, or until it is known why not.

One call connects, proves the id and compares clocks. Nodes are started seconds apart, so that
nothing listens at the endpoint is no fault for half a minute; nor is a machine that does not
answer; nor, among containers, a name or an address that is not there, since it comes with what is
started. A port that a firewall closes is known sooner:

- The coordinator also listens at a *side door*, another port that follows from the rendezvous id.
  A node that reaches it there, and then not at the endpoint, knows that the endpoint's port is
  closed on the way.
- A machine on whose port nothing listens refuses at once. If it answers at another port (open or
  refused), but at the endpoint's not at all, that port is filtered, whether the coordinator has
  started or not. So is one of a machine that answers a ping, but at no port at all.
- What answers by ICMP that it is prohibited is a firewall. A plain "port unreachable" proves
  nothing: Kubernetes answers so for a service that has not started.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ddpdoctor.preflight.machine.network import resolve
from ddpdoctor.preflight.protocol import connecting, wire
from ddpdoctor.preflight.protocol.connecting import Closed, ConnectError, connect, echoes
from ddpdoctor.preflight.protocol.messages import Knock, Welcome
from ddpdoctor.preflight.protocol.wire import Link, WireError, unpacked
from ddpdoctor.preflight.situation import joined_endpoint

# -- A call to the coordinator: connect, prove the id, compare clocks; or know why not


GREETING_LIMIT = 3.0
CLOCK_QUESTIONS = 8

Kind = Literal[
    Closed,
    "unresolved",  # the endpoint's name is not known here
    "silent",  # connected, but nothing was said
    "other service",  # connected to something that is no check
    "other id",  # a check with another rendezvous id, most likely of another job
    "late",  # a check that went on without this node
    "full",  # a check that has all its nodes
    "gone",  # the connection was lost
    "time",  # the check's own time was over in the middle
]

FINAL_KINDS: frozenset[Kind] = frozenset({"other id", "late", "full"})
"""What trying again does not change."""


@dataclass(frozen=True)
class Problem:
    """Why a node is not connected to the coordinator.

    Attributes:
        address: Which address of the endpoint it is about; empty if there is none.
        words: More, for a person: the kernel's words, or who is there already.
        sender: Who rejects it by ICMP; empty if that is not so.
        answering: A port at which that machine does answer; 0 if none is known.
        echoes: Whether it answers a ping.
        here: The host names of those that are there already.
        door: The other port at which the coordinator itself answers; 0 if it does not.
        behind: The coordinator's own address, where that is not the one that was dialled.
        waited: Seconds until this was settled.
    """

    kind: Kind
    address: str = ""
    words: str = ""
    sender: str = ""
    answering: int = 0
    echoes: bool = False
    here: tuple[str, ...] = ()
    door: int = 0
    behind: str = ""
    waited: float = 0.0


class CallError(Exception):
    """The coordinator was not reached."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.kind)
        self.problem = problem


@dataclass
class Call:
    """A connection to the coordinator.

    Attributes:
        identity: Which coordinator it is.
        offset: What the coordinator's clock is ahead, in seconds.
        uncertainty: Half the round trip of that estimate, in seconds.
        address: Where it was called.
        reached: Where the call ended: another address if one is translated on the way.
    """

    link: Link
    identity: str
    offset: float
    uncertainty: float
    address: str = ""
    reached: str = ""


async def call_once(address: str, port: int, key: bytes, hostname: str) -> Call:
    """One attempt to reach the coordinator at an address and port of the endpoint.

    Args:
        address: Of the endpoint.
        port: Of the endpoint.
        key: Of :func:`wire.key_of`.
        hostname: This node's.

    Raises:
        CallError: It failed.
    """
    try:
        reader, writer = await connect(address, port)
    except ConnectError as error:
        raise CallError(Problem(error.kind, address, error.words, error.sender)) from None
    link = Link(reader, writer)
    try:
        return await _introduce(link, address, key, hostname)
    except BaseException as error:
        await link.close()
        if isinstance(error, WireError):
            raise CallError(Problem("gone", address, str(error))) from None
        raise


async def _introduce(link: Link, address: str, key: bytes, hostname: str) -> Call:
    try:
        line = await asyncio.wait_for(link.reader.readexactly(wire.GREETING_BYTES), GREETING_LIMIT)
        challenge = wire.challenge_in(line)
    except asyncio.TimeoutError:
        raise CallError(Problem("silent", address)) from None
    except (OSError, asyncio.IncompleteReadError):
        challenge = None
    if challenge is None:
        raise CallError(Problem("other service", address))
    own = wire.nonce()
    await link.send(Knock(wire.proof(key, "node", challenge), own, hostname))
    welcome = await _welcome(link)
    if welcome.refused == "id":
        raise CallError(Problem("other id", address))
    if not wire.proves(welcome.proof, key, "coordinator", own):
        raise CallError(Problem("other service", address))
    if welcome.refused:
        raise refused(welcome, address)
    # How far the coordinator's clock is ahead, by the fastest of several questions, as in NTP.
    uncertainty, offset = float("inf"), 0.0
    for _ in range(CLOCK_QUESTIONS):
        wall, began = time.time(), time.monotonic()
        await link.send(Knock())
        answer = await _welcome(link)
        half = (time.monotonic() - began) / 2
        if half < uncertainty:
            uncertainty, offset = half, answer.time - (wall + half)
    return Call(link, welcome.identity, offset, uncertainty, address, welcome.reached)


async def _welcome(link: Link) -> Welcome:
    message = await link.receive(GREETING_LIMIT, connecting.PROOF_BYTES)
    try:
        return unpacked(Welcome, message)
    except ValueError as error:
        raise WireError(str(error)) from None


def refused(welcome: Welcome, address: str = "") -> CallError:
    """That the coordinator goes on without this node."""
    here = welcome.here
    words = f"{len(here)} of {welcome.nnodes} nodes are there: {', '.join(here)}"
    kind: Kind = "full" if welcome.refused == "full" else "late"
    return CallError(Problem(kind, address, words, here=here))


# -- joining


RETRY_AFTER = 0.25

SETTLED_AFTER = 7.0
"""Seconds of nothing but the same failure after which waiting longer will not change it: two
connections, each with three lost SYNs."""

SPEAK_AFTER = 8.0
"""Seconds after which a person who waits sees for what."""

DOORS = 3
"""Side doors that are tried: the first that was free is open."""

DOOR_LIMIT = 1.2
"""Seconds for a side door to answer: a lost SYN is sent again after 1."""

DOORS_EVERY = 2.0

SSH = 22
"""The port that a machine most likely answers at."""

SSH_TRIES = 2

_EPHEMERAL = (32768, 60999)
"""Ports that nodes have to reach each other at anyway (net.ipv4.ip_local_port_range)."""

_BEHIND: frozenset[Kind] = frozenset({"refused", "dropped", "prohibited", "unreachable"})
"""Problems about which the machine's other ports reveal more."""

_LASTING: frozenset[Kind] = frozenset({"prohibited", "no route"})
"""Problems that do not end by the coordinator being started."""

_NOT_THERE: frozenset[Kind] = frozenset({"unresolved", "no host"})
"""Nor do these, but among containers: there, a name and an address come with what is started."""

_FAR: dict[Kind, int] = {
    "gone": 0, "other service": 1, "silent": 2, "refused": 3, "dropped": 4, "prohibited": 5
}  # fmt: skip
"""How far an attempt came; whatever is not here, no further."""

_PROGRESS: dict[Kind, str] = {
    "refused": "nothing listens there yet",
    "dropped": "no answer",
    "no host": "no machine has that address yet",
    "unresolved": "the name does not resolve here yet",
    "no route": "this machine has no route to it",
    "silent": "something else answers there",
    "other service": "something else answers there",
}


@dataclass(frozen=True)
class Goal:
    """Whom to reach, and as whom.

    Attributes:
        host: Of the endpoint.
        port: Of the endpoint.
        key: Of :func:`wire.key_of`.
        hostname: This node's.
        rank: This node's; None if torchrun is to choose.
    """

    host: str
    port: int
    key: bytes
    hostname: str
    rank: int | None


def side_doors(key: bytes, port: int) -> tuple[int, ...]:
    """The ports at which the coordinator of an endpoint may also be reached."""
    first, last = _EPHEMERAL
    digest = hashlib.sha256(key + port.to_bytes(2, "big")).digest()
    numbers = (int.from_bytes(digest[at : at + 4], "big") for at in range(0, 4 * DOORS, 4))
    doors = (first + number % (last - first + 1) for number in numbers)
    return tuple(dict.fromkeys(door for door in doors if door != port))


async def call_any(goal: Goal) -> Call:
    """Try each address of the endpoint once.

    Raises:
        CallError: It was not reached; about the address that got furthest.
    """
    found = await asyncio.get_running_loop().run_in_executor(None, resolve, goal.host)
    problems = []
    for address in found.addresses:
        try:
            return await call_once(address, goal.port, goal.key, goal.hostname)
        except CallError as error:
            if error.problem.kind in FINAL_KINDS:
                raise
            problems.append(error.problem)
    if not problems:
        raise CallError(Problem("unresolved", words=found.problem))
    raise CallError(_furthest(problems))


def _furthest(problems: list[Problem]) -> Problem:
    """Of the addresses of one name the one that got furthest: the others may be out of reach."""
    return min(problems, key=lambda problem: _FAR.get(problem.kind, len(_FAR)))


async def join(
    goal: Goal, until: float, say: Callable[[str], None], *, appears: bool = False
) -> Call:
    """Reach the coordinator, trying again until it is there, or until it is clear why it is not.

    Args:
        goal: Whom.
        until: Monotonic time to give up at.
        say: Called once, with a line for a person: what is being waited for.
        appears: Whether its name and its address may come with it, as a container's do.

    Raises:
        CallError: It was not reached; with what it mostly was.
    """
    lasting = _LASTING if appears else _LASTING | _NOT_THERE
    return await _Attempts(goal, until, say, lasting).run()


class _Attempts:
    """The attempts of one node, and what they show."""

    def __init__(
        self, goal: Goal, until: float, say: Callable[[str], None], lasting: frozenset[Kind]
    ) -> None:
        self._goal = goal
        self._until = until
        self._say = say
        self._lasting = lasting
        self._began = time.monotonic()
        self._said = False
        self._looked = float("-inf")
        self._seen: list[Problem] = []
        self._ssh_tries = 0
        self._answering: dict[str, int] = {}
        """Ports at which the endpoint's machines answer, by address."""
        self._echoing: set[str] = set()
        """Addresses of those that answer a ping."""

    async def run(self) -> Call:
        while True:
            began = time.monotonic()
            try:
                return await call_any(self._goal)
            except CallError as error:
                problem = error.problem
                if problem.kind in FINAL_KINDS:
                    raise
            self._seen.append(problem)
            took = time.monotonic() - began
            # Known before this attempt: else it may just have come up.
            was_up = self._is_up(problem.address)
            if problem.kind in _BEHIND and time.monotonic() - self._looked > DOORS_EVERY:
                self._looked = time.monotonic()
                call = await self._at_other_ports(problem)
                if call is not None:
                    return call
            waited = time.monotonic() - self._began
            if self._is_settled(waited, was_up=was_up):
                raise CallError(self._usual_problem())
            if time.monotonic() + RETRY_AFTER + took >= self._until:
                raise CallError(self._usual_problem())
            if waited > SPEAK_AFTER and not self._said:
                self._said = True
                self._say(self._progress(problem))
            await asyncio.sleep(RETRY_AFTER)

    def _is_up(self, address: str) -> bool:
        return address in self._answering or address in self._echoing

    def _is_settled(self, waited: float, *, was_up: bool) -> bool:
        kinds = {problem.kind for problem in self._seen}
        if waited < SETTLED_AFTER or len(self._seen) < 2 or len(kinds) > 1:
            return False
        (kind,) = kinds
        return kind in self._lasting or (kind == "dropped" and was_up)

    def _usual_problem(self) -> Problem:
        """How it mostly was says more than how it was last."""
        problem = Counter(reversed(self._seen)).most_common(1)[0][0]
        return replace(
            problem,
            answering=self._answering.get(problem.address, 0),
            echoes=problem.address in self._echoing,
            waited=time.monotonic() - self._began,
        )

    def _progress(self, problem: Problem) -> str:
        goal = self._goal
        what = _PROGRESS.get(problem.kind) or problem.words or problem.kind
        if problem.kind == "dropped" and not self._is_up(problem.address):
            what = "no answer, at other ports neither: it is down, or a firewall drops everything"
        at = f" ({problem.address})" if problem.address not in ("", goal.host) else ""
        left = max(0.0, self._until - time.monotonic())
        endpoint = joined_endpoint(goal.host, goal.port)
        return f"waiting for {endpoint}{at}: {what}; {left:.0f} s more"

    async def _at_other_ports(self, problem: Problem) -> Call | None:
        """See whether the coordinator, or at least its machine, answers at another port.

        Returns:
            The coordinator, if it came to the endpoint in the meantime.

        Raises:
            CallError: It is there, and the endpoint is closed.
        """
        goal, address = self._goal, problem.address
        doors = side_doors(goal.key, goal.port)
        # A machine that refuses is up, and some ban those who come to SSH and say nothing.
        ports = (
            doors if problem.kind == "refused" or self._ssh_tries == SSH_TRIES else (*doors, SSH)
        )
        self._ssh_tries += SSH in ports
        *tried, _ = await asyncio.gather(
            *(self._try(address, port) for port in ports), self._ping(problem)
        )
        answering = [port for port, answers in zip(ports, tried, strict=True) if answers]
        if answering and address not in self._answering:
            # SSH means more to a person than a random number.
            self._answering[address] = SSH if SSH in answering else answering[0]
        for door in doors:
            if door not in answering:
                continue
            side = None
            try:
                side = await call_once(address, door, goal.key, goal.hostname)
            except CallError as error:
                if error.problem.kind not in ("late", "full"):
                    # Something else has that port.
                    continue
            try:
                # It may have begun a moment ago; now that it is there, this one counts.
                return await call_once(address, goal.port, goal.key, goal.hostname)
            except CallError as error:
                again = error.problem
                if again.kind in FINAL_KINDS:
                    raise
                if again.kind in _BEHIND:
                    waited = time.monotonic() - self._began
                    if side is not None:
                        with contextlib.suppress(WireError):
                            await side.link.send({"blocked": again.kind, "rank": goal.rank})
                    behind = "" if side is None or side.reached == address else side.reached
                    settled = replace(again, door=door, behind=behind, waited=waited)
                    raise CallError(settled) from None
            finally:
                if side is not None:
                    await side.link.close()
        return None

    async def _ping(self, problem: Problem) -> None:
        address = problem.address
        if problem.kind != "dropped" or address in self._echoing:
            return
        if await echoes(address, DOOR_LIMIT / 2):
            self._echoing.add(address)

    async def _try(self, address: str, port: int) -> bool:
        """Whether the machine answers at a port: it takes the connection, or refuses it itself."""
        try:
            _, writer = await connect(address, port, DOOR_LIMIT)
        except ConnectError as error:
            return error.kind == "refused" and error.sender in ("", address)
        writer.transport.abort()
        return True
