"""Call the coordinator until it answers, or until it is clear why it does not.

One call connects, proves the id and compares the clocks. Nodes are started seconds apart, so for
half a minute it is normal that nothing listens at the endpoint or that its machine does not answer.
Among containers a missing name or address is normal as well, since both come with the container. A
port that a firewall closes is recognized sooner:

- The coordinator also listens at a *spare port*, another port that follows from the id. A node that
  reaches it there, and then not at the endpoint, knows that the endpoint's port is closed.
- A machine on whose port nothing listens refuses at once. If it answers at another port (open or
  refused), but not at the endpoint's, that port is filtered, whether the coordinator has started or
  not. The same holds for a machine that answers a ping, but no port.
- An ICMP message that says "prohibited" comes from a firewall. A plain "port unreachable" proves
  nothing: Kubernetes sends it for a service that has not started.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ddpdoctor.core import opening
from ddpdoctor.core.formatting import shown
from ddpdoctor.preflight.machine.network import resolve
from ddpdoctor.preflight.protocol import wire
from ddpdoctor.preflight.protocol.messages import Hello, Welcome
from ddpdoctor.preflight.protocol.wire import (
    Closed,
    ConnectError,
    Link,
    WireError,
    connect,
    echoes,
    unpacked,
)
from ddpdoctor.preflight.situation import joined_endpoint

# -- one call: connect, prove the id, compare clocks


GREETING_TIMEOUT = 3.0
CLOCK_QUESTIONS = 8

Kind = Literal[
    Closed,
    "unresolved",  # the endpoint's name is not known here
    "silent",  # connected, but nothing was received
    "other service",  # connected to something that is not a coordinator
    "other id",  # a coordinator with another rendezvous id, most likely of another job
    "late",  # a coordinator that went on without this node
    "full",  # a coordinator that has all its nodes
    "gone",  # the connection was lost
    "time",  # this check's own time was over
]

FINAL_KINDS: frozenset[Kind] = frozenset({"other id", "late", "full"})
"""Problems that another try would not solve."""


@dataclass(frozen=True)
class Problem:
    """Why a node is not connected to the coordinator."""

    kind: Kind
    address: str = ""  # The address of the endpoint that was called; empty if there is none
    words: str = ""
    """Details for the user: the kernel's message, or the nodes that are there already."""
    sender: str = ""  # The address that rejected the call by ICMP, if any
    answering: int = 0  # A port at which the machine does answer; 0 if none is known
    echoes: bool = False  # Whether the machine answers a ping
    here: tuple[str, ...] = ()  # The host names of the nodes that are there already
    spare: int = 0  # The spare port at which the coordinator answers; 0 if it does not
    by_udp: bool = False  # Whether it answers by UDP
    unheard: bool = False  # Whether it receives this node's calls, but its answers do not arrive
    behind: str = ""  # The coordinator's own address, if the call ended at another one
    waited: float = 0.0  # Seconds until this was clear


class CallError(Exception):
    """The coordinator was not reached."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.kind)
        self.problem = problem


@dataclass
class Call:
    """A connection to the coordinator, which has a random ``identity``."""

    link: Link
    identity: str
    offset: float  # Seconds by which the coordinator's clock is ahead
    uncertainty: float  # Half the round trip of that estimate, in seconds
    address: str = ""  # The address that was called
    reached: str = ""
    """The address at which the call ended, which differs if it is translated on the way."""


async def call_once(address: str, port: int, key: bytes, hostname: str) -> Call:
    """Try once to reach the coordinator, at the port of the endpoint or at a spare port.

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
    line = b""
    # SSH sends less than a coordinator does, and then waits as well.
    with contextlib.suppress(OSError), wire.ProcessClock() as clock:
        while len(line) < wire.GREETING_BYTES and not line.endswith(b"\n"):
            reading = link.reader.read(wire.GREETING_BYTES - len(line))
            try:
                part = await clock.within(reading, GREETING_TIMEOUT)
            except TimeoutError:
                if not line:
                    raise CallError(Problem("silent", address)) from None
                break
            if not part:
                break
            line += part
    challenge = wire.challenge_in(line)
    if challenge is None:
        said = shown(line.decode("latin-1").strip())
        words = f"it says {said!r}" if said else ""
        raise CallError(Problem("other service", address, words))

    async def ask(hello: Hello) -> Welcome:
        await link.send(hello)
        message = await link.receive(GREETING_TIMEOUT, wire.PROOF_BYTES)
        try:
            return unpacked(Welcome, message)
        except ValueError as error:
            raise WireError(str(error)) from None

    own = wire.nonce()
    welcome = await ask(Hello(wire.proof(key, "node", challenge), own, hostname))
    if welcome.refused == "id":
        raise CallError(Problem("other id", address))
    if not wire.proves(welcome.proof, key, "coordinator", own):
        raise CallError(Problem("other service", address))
    if welcome.refused:
        raise refused(welcome, address)
    # The fastest of several questions tells how far the coordinator's clock is ahead, as in NTP.
    uncertainty, offset = float("inf"), 0.0
    for _ in range(CLOCK_QUESTIONS):
        wall, began = time.time(), time.monotonic()
        answer = await ask(Hello())
        half = (time.monotonic() - began) / 2
        if half < uncertainty:
            uncertainty, offset = half, answer.time - (wall + half)
    return Call(link, welcome.identity, offset, uncertainty, address, welcome.reached)


def refused(welcome: Welcome, address: str = "") -> CallError:
    """Return the error for a coordinator that goes on without this node."""
    here = welcome.here
    words = f"{len(here)} of {welcome.nnodes} nodes are there: {', '.join(here)}"
    kind: Kind = "full" if welcome.refused == "full" else "late"
    return CallError(Problem(kind, address, words, here=here))


# -- notices: a node that cannot connect by TCP says so by UDP
#
# A connection needs both directions, a datagram only one. So node 0 learns why a node is absent,
# even if its answers do not arrive there. A notice proves the id like any other message, and is
# answered.


MAX_NOTICE = 1024
REPLY_TIMEOUT = 0.6  # Seconds for node 0's answer
HALF_OPEN = "half open"  # Node 0's answer if it receives the calls, but its answers do not arrive

_SYN_RECEIVED = "03"  # The state in /proc/net/tcp, of Linux's include/net/tcp_states.h


class Notices(asyncio.DatagramProtocol):
    """Node 0's end. ``hear`` takes a notice and its sender, and returns the answer."""

    def __init__(self, key: bytes, hear: Callable[[Hello, str], str]) -> None:
        self._key = key
        self._hear = hear

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        """Store the transport on which responses are sent."""
        self._transport = transport

    def datagram_received(self, data: bytes, sender: tuple[str, int]) -> None:
        """Answer a notice that proves the id. Ignore anything else."""
        with contextlib.suppress(ValueError, TypeError):
            hello = _read_notice(Hello, data)
            if wire.proves(hello.proof, self._key, "notice", hello.nonce):
                address = sender[0].removeprefix("::ffff:").partition("%")[0]
                proof = wire.proof(self._key, "noticed", hello.nonce)
                reply = Welcome(proof=proof, refused=self._hear(hello, address))
                self._transport.sendto(wire.packed(reply), sender)


async def hear_notices(
    port: int, key: bytes, hear: Callable[[Hello, str], str]
) -> asyncio.BaseTransport | None:
    """Listen for notices; None if the port is taken."""
    dual = socket.has_dualstack_ipv6()
    family, everywhere = (socket.AF_INET6, "::") if dual else (socket.AF_INET, "")
    with contextlib.suppress(OSError):
        listening = socket.socket(family, socket.SOCK_DGRAM)
        try:
            if dual:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listening.bind((everywhere, port))
            loop = asyncio.get_running_loop()
            make = lambda: Notices(key, hear)  # noqa: E731
            return (await loop.create_datagram_endpoint(make, sock=listening))[0]
        except OSError:
            listening.close()
    return None


async def send_notice(address: str, port: int, key: bytes, hello: Hello) -> str | None:
    """Send a notice. Return node 0's answer; None if none came."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError, TimeoutError, asyncio.TimeoutError, ValueError, TypeError):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.setblocking(False)
            asking.connect((address, port))
            await loop.sock_sendall(asking, wire.packed(hello))
            data = await asyncio.wait_for(loop.sock_recv(asking, MAX_NOTICE), REPLY_TIMEOUT)
            reply = _read_notice(Welcome, data)
            if wire.proves(reply.proof, key, "noticed", hello.nonce):
                return reply.refused
    return None


def notice(key: bytes, host: str, rank: int | None, blocked: str) -> Hello:
    """Return a notice of why the rendezvous port is closed; a question if ``blocked`` is empty."""
    nonce = wire.nonce()
    proof = wire.proof(key, "notice", nonce)
    return Hello(proof=proof, nonce=nonce, host=host, rank=rank, blocked=blocked)


def _read_notice(declared: type[wire.P], data: bytes) -> wire.P:
    message = opening.loads(data[wire.HEAD_BYTES : MAX_NOTICE])
    return wire.unpacked(declared, message if isinstance(message, dict) else {})


def half_open(port: int, proc: Path = Path("/proc")) -> set[str]:
    """Return the addresses whose calls arrived at a port, but to which no answer gets through."""
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError):
            for row in (proc / "net" / name).read_text().splitlines()[1:]:
                _, local, remote, state, *_ = row.split()
                if state == _SYN_RECEIVED and int(local.rpartition(":")[2], 16) == port:
                    words = bytes.fromhex(remote.partition(":")[0])
                    # The kernel prints 32-bit words in the machine's order of bytes.
                    packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                    address = ipaddress.ip_address(packed)
                    found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return found


# -- repeated calls


RETRY_AFTER = 0.25

SETTLED_AFTER = 7.0
"""Seconds of the same failure after which waiting longer will not help: two connections, each with
three lost SYNs."""

SPEAK_AFTER = 8.0  # Seconds after which a message says what the node waits for
MAX_SPARES = 3  # Spare ports that are tried. The coordinator listens at the first free one.
SPARE_TIMEOUT = 1.2  # Seconds for a spare port to answer. A lost SYN is sent again after 1 s.

SPARES_INTERVAL = 2.0

SSH = 22  # The port that a machine most likely answers at

SSH_TRIES = 2

_EPHEMERAL = (32768, 60999)
"""Ports at which nodes have to reach each other anyway (net.ipv4.ip_local_port_range)."""

_BEHIND: frozenset[Kind] = frozenset({"refused", "dropped", "prohibited", "unreachable"})
"""Problems about which the machine's other ports reveal more."""

_LASTING: frozenset[Kind] = frozenset({"prohibited", "no route"})
"""Problems that do not go away when the coordinator starts."""

_NOT_THERE: frozenset[Kind] = frozenset({"unresolved", "no host"})
"""The same, except among containers, whose names and addresses come when they start."""

_FAR: dict[Kind, int] = {
    "gone": 0, "other service": 1, "silent": 2, "refused": 3, "dropped": 4, "prohibited": 5
}  # fmt: skip
"""How far an attempt got, the furthest first. Kinds that are not listed got less far."""

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
    """The endpoint to reach, and this node's name and rank. For the key see `wire.key_of`."""

    host: str
    port: int
    key: bytes
    hostname: str
    rank: int | None


def spare_ports(key: bytes, port: int) -> tuple[int, ...]:
    """Return the other ports at which the coordinator of an endpoint may listen."""
    first, last = _EPHEMERAL
    digest = hashlib.sha256(key + port.to_bytes(2, "big")).digest()
    numbers = (int.from_bytes(digest[at : at + 4], "big") for at in range(0, 4 * MAX_SPARES, 4))
    spares = (first + number % (last - first + 1) for number in numbers)
    return tuple(dict.fromkeys(spare for spare in spares if spare != port))


async def call_any(goal: Goal) -> Call:
    """Try each address of the endpoint once.

    Raises:
        CallError: No address was reached. The error is that of the attempt that got furthest.
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
    raise CallError(min(problems, key=lambda problem: _FAR.get(problem.kind, len(_FAR))))


async def _no_trouble() -> str:
    return ""


async def join(
    goal: Goal,
    until: float,
    say: Callable[[str], None],
    *,
    appears: bool = False,
    trouble: Callable[[], Awaitable[str]] = _no_trouble,
) -> Call:
    """Call the coordinator until it answers, or until it is clear why it does not.

    ``say`` is called once, with a line about the wait. ``appears`` is whether name and address may
    appear only with the coordinator, as a container's do. ``trouble`` returns a fault of this
    machine's own network, to report to node 0.

    Raises:
        CallError: It was not reached. The most frequent problem counts.
    """
    lasting = _LASTING if appears else _LASTING | _NOT_THERE
    return await _Attempts(goal, until, say, lasting, trouble).run()


class _Attempts:
    """The attempts of one node, and what they reveal."""

    def __init__(
        self,
        goal: Goal,
        until: float,
        say: Callable[[str], None],
        lasting: frozenset[Kind],
        trouble: Callable[[], Awaitable[str]],
    ) -> None:
        self._goal = goal
        self._until = until
        self._say = say
        self._lasting = lasting
        self._trouble = trouble
        self._began = time.monotonic()
        self._said = False
        self._tried_spares = float("-inf")
        self._problems: list[Problem] = []
        self._ssh_tries = 0
        self._answering: dict[str, int] = {}
        """Ports at which the endpoint's machines answer, by address."""
        self._echoing: set[str] = set()  # Addresses of machines that answer a ping

    async def run(self) -> Call:
        while True:
            began = time.monotonic()
            try:
                return await call_any(self._goal)
            except CallError as error:
                problem = error.problem
                if problem.kind in FINAL_KINDS:
                    raise
            self._problems.append(problem)
            took = time.monotonic() - began
            # Check before trying the spare ports: the machine may have come up just now.
            was_up = self._is_up(problem.address)
            if problem.kind in _BEHIND and time.monotonic() - self._tried_spares > SPARES_INTERVAL:
                self._tried_spares = time.monotonic()
                call = await self._at_other_ports(problem)
                if call is not None:
                    return call
            waited = time.monotonic() - self._began
            settled = (
                waited >= SETTLED_AFTER
                and len(self._problems) > 1
                and len({each.kind for each in self._problems}) == 1
                and (problem.kind in self._lasting or (problem.kind == "dropped" and was_up))
            )
            if settled or time.monotonic() + RETRY_AFTER + took >= self._until:
                usual = Counter(reversed(self._problems)).most_common(1)[0][0]
                answering = self._answering.get(usual.address, 0)
                echoing = usual.address in self._echoing
                raise CallError(replace(usual, answering=answering, echoes=echoing, waited=waited))
            if waited > SPEAK_AFTER and not self._said:
                self._said = True
                self._say(self._progress(problem))
            await asyncio.sleep(RETRY_AFTER)

    def _is_up(self, address: str) -> bool:
        return address in self._answering or address in self._echoing

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
        """Find out whether the coordinator, or at least its machine, answers at another port.

        Returns:
            The coordinator, if it came to the endpoint in the meantime.

        Raises:
            CallError: It is there, and the endpoint is closed.
        """
        goal, address = self._goal, problem.address
        spares = spare_ports(goal.key, goal.port)
        # A machine that refuses is up, and some machines ban callers that send nothing to SSH.
        ssh = problem.kind != "refused" and self._ssh_tries < SSH_TRIES
        ports = (*spares, SSH) if ssh else spares
        self._ssh_tries += ssh
        *tried, _ = await asyncio.gather(
            *(self._answers(address, port) for port in ports), self._ping(problem)
        )
        answering = [port for port, answers in zip(ports, tried, strict=True) if answers]
        if answering and address not in self._answering:
            # SSH means more to the user than a random port number.
            self._answering[address] = SSH if SSH in answering else answering[0]
        for spare in spares:
            if spare not in answering:
                continue
            side = None
            try:
                side = await call_once(address, spare, goal.key, goal.hostname)
            except CallError as error:
                if error.problem.kind not in ("late", "full"):
                    # Something else has that port.
                    continue
            try:
                # The coordinator may have started just now. Since it is up, this result counts.
                return await call_once(address, goal.port, goal.key, goal.hostname)
            except CallError as error:
                again = error.problem
                if again.kind in FINAL_KINDS:
                    raise
                if again.kind in _BEHIND:
                    waited = time.monotonic() - self._began
                    if side is not None:
                        with contextlib.suppress(WireError):
                            await side.link.send(Hello(rank=goal.rank, blocked=again.kind))
                    behind = "" if side is None or side.reached == address else side.reached
                    settled = replace(again, spare=spare, behind=behind, waited=waited)
                    raise CallError(settled) from None
            finally:
                if side is not None:
                    await side.link.close()
        return await self._by_udp(address)

    async def _by_udp(self, address: str) -> Call | None:
        """Ask the coordinator by UDP whether it is up, and report why this node cannot connect.

        Returns:
            The coordinator, if it came to the endpoint in the meantime.

        Raises:
            CallError: It is there, and the endpoint is closed.
        """
        goal = self._goal
        if await self._tell(address, "") is None:
            alike = len({each.kind for each in self._problems}) == 1 and len(self._problems) > 1
            if alike and time.monotonic() - self._began > SETTLED_AFTER:
                await self._tell(address, await self._trouble() or self._problems[-1].kind)
            return None
        try:
            return await call_once(address, goal.port, goal.key, goal.hostname)
        except CallError as error:
            again = error.problem
            if again.kind in FINAL_KINDS:
                raise
            if again.kind not in _BEHIND:
                return None
            unheard = await self._tell(address, await self._trouble() or again.kind) == HALF_OPEN
            waited = time.monotonic() - self._began
            raise CallError(replace(again, by_udp=True, unheard=unheard, waited=waited)) from None

    async def _tell(self, address: str, why: str) -> str | None:
        goal = self._goal
        hello = notice(goal.key, goal.hostname, goal.rank, why)
        return await send_notice(address, goal.port, goal.key, hello)

    async def _ping(self, problem: Problem) -> None:
        address = problem.address
        new = problem.kind == "dropped" and address not in self._echoing
        if new and await echoes(address, SPARE_TIMEOUT / 2):
            self._echoing.add(address)

    async def _answers(self, address: str, port: int) -> bool:
        """Return whether the machine itself accepts or refuses a connection at a port."""
        try:
            _, writer = await connect(address, port, SPARE_TIMEOUT)
        except ConnectError as error:
            return error.kind == "refused" and error.sender in ("", address)
        writer.transport.abort()
        return True
