"""The nodes of a round hear each other, over connections between their torchruns.

The first two nodes of a round (the hubs) hear all nodes, and all nodes hear them. A hub publishes its address and a key in the round's store.
Both sides send a byte every INTERVAL_S: ALIVE, or CHANGED if the state of the rendezvous has changed. A hub passes CHANGED on to all others.

A node is suspected if its connection has ended and it does not connect again, or if it says nothing for longer than a limit. The limit grows
with the gaps that the connection has shown. Time in which this process itself stood still counts for no node. A node that was never heard in
this round is never suspected, so a network that lets no connection through costs nothing.

The handler writes a suspicion into the state of the rendezvous (handlers.py). In a world of more than two, a node that
hears no other one any more is probably the one that is cut off. It writes its suspicion QUIET_S later, and the others write theirs first.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Hearing", "Peer", "reaches"]

_LOGGER = logging.getLogger("nebulaml.elastic")
HUBS = 2
INTERVAL_S = 0.25
QUIET_S = 2.0  # the limit of silence on a network that has shown no gaps
MOST_S = 10.0  # the limit of silence on any network
GAPS = 100  # the newest gaps that count
AGAIN_S = 0.2  # a node whose connection has ended connects again within this time
CONNECT_S = 2.0
END_S = 10.0  # a round that is over waits so long for its threads: one of them may be writing to storage
PUBLISHED_S = 60.0  # a hub publishes its address within this time
ALIVE, CHANGED = b".", b"!"
NONCE, DIGEST = 16, 32
GREETING = 4 + NONCE + DIGEST


class Peer:
    """A node as this one hears it. Times are this process's, in seconds."""

    def __init__(self, rank: int, now: float, quiet_s: float = QUIET_S, interval_s: float = INTERVAL_S) -> None:
        self.rank = rank
        self.heard = now
        self.quiet_s, self.interval_s = quiet_s, interval_s
        self.gaps: deque[float] = deque(maxlen=GAPS)

    def hear(self, now: float) -> None:
        self.gaps.append(min(now - self.heard, self.quiet_s))  # one long pause makes no node deaf for the next hundred
        self.heard = now

    def limit_s(self) -> float:
        """How long this node may say nothing."""
        late = max(self.gaps, default=0.0) - self.interval_s
        return min(self.quiet_s + 2 * max(late, 0.0), max(MOST_S, self.quiet_s))

    def is_silent(self, now: float) -> bool:
        return now - self.heard > self.limit_s()


class Hearing:
    """Hears the nodes of one round after the other.

    on_lost(rank, why): that node is suspected. on_changed(): another node says that the state has changed. Both run in threads of this object.
    """

    def __init__(
        self,
        address: str,
        on_lost: Callable[[int, str], None],
        on_changed: Callable[[], None],
        quiet_s: float = QUIET_S,
    ) -> None:
        self._address, self._on_lost, self._on_changed, self._quiet_s = address, on_lost, on_changed, quiet_s
        self._round: _Round | None = None

    def begin(self, rank: int, world: int, number: int, store: Any) -> None:
        """Hears the nodes of the round of that number. The only node of a round listens, too: a node that was cut off tries to reach it.

        store: one written in Python. A thread that is inside torch's C++ when the interpreter ends would crash it.
        """
        self.end()
        self._round = _Round(rank, world, number, store, self._address, self._on_lost, self._on_changed, self._quiet_s)

    def has_heard(self) -> bool:
        """Whether this node has heard another one of this round. If not, perhaps the network lets no connection through."""
        return self._round is not None and self._round.has_heard

    def tell(self) -> None:
        """Tells the others that the state has changed."""
        if self._round is not None:
            self._round.tell()

    def end(self) -> None:
        if self._round is not None:
            self._round.end()
            self._round = None


def reaches(number: int, world: int, store: Any) -> bool | None:
    """Whether this node reaches the hubs of a round of that many nodes. None: they have not published their addresses."""
    for hub in range(min(world, HUBS)):
        if not store.check([_key(number, hub)]):
            return None
        said = json.loads(store.get(_key(number, hub)))
        try:
            with socket.create_connection((said["address"], said["port"]), CONNECT_S) as connection:
                _exactly(connection, NONCE)
        except OSError:
            return False
    return True


def _key(number: int, hub: int) -> str:
    return f"hear/{number}/{hub}"


class _Round:
    def __init__(
        self, rank: int, world: int, number: int, store: Any, address: str, on_lost: Callable[[int, str], None],
        on_changed: Callable[[], None], quiet_s: float,
    ) -> None:  # fmt: skip
        self.rank, self.world, self.number, self.store, self.address = rank, world, number, store, address
        self.on_lost, self.on_changed, self.quiet_s = on_lost, on_changed, quiet_s
        self.interval_s = max(INTERVAL_S, world / 1000)  # a hub of many nodes has time for each
        self.woken, self.waker = socket.socketpair()
        for each in (self.woken, self.waker):
            each.setblocking(False)
        self.over = threading.Event()
        self.lock = threading.Lock()  # guards the next three, and the list of threads
        self.new: list[tuple[socket.socket, int]] = []
        self.has_changed = False
        self.suspected: set[int] = set()
        self.has_heard = False
        self.listener, self.key = None, b""
        if rank < HUBS:
            self._listen()
        self.ears = _Ears(self)
        self.threads: list[threading.Thread] = []
        self.start(self._hear, "NebulaHearing")
        for hub in range(min(rank, HUBS)):
            self.reach(hub, again=False)

    def start(self, call: Callable[..., None], name: str, *given: Any) -> None:
        """Starts a thread of this round, unless that is over. end() waits for all of them: what they use is closed after it."""
        thread = threading.Thread(target=call, args=given, name=name, daemon=True)
        with self.lock:
            if self.over.is_set():
                return
            self.threads = [*(each for each in self.threads if each.is_alive()), thread]
            thread.start()

    def reach(self, hub: int, again: bool) -> None:
        self.start(self._reach, "NebulaReaching", hub, again)

    def _listen(self) -> None:
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self.listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self.listener.bind((self.address, 0))
        except OSError:  # a name of this node that it does not resolve to an address of its own
            self.listener.bind(("", 0))
        self.listener.listen(1024)
        self.listener.setblocking(False)
        self.key = os.urandom(32)

    def tell(self) -> None:
        with self.lock:
            self.has_changed = True
        self._wake()

    def end(self) -> None:
        with self.lock:
            self.over.set()
            threads = self.threads
        self._wake()
        deadline = time.monotonic() + END_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self.waker.send(b"x")

    def suspect(self, rank: int, why: str, after_s: float = 0.0) -> None:
        """Tells the handler, once for each node. It writes to storage, which may take long."""
        with self.lock:
            if rank in self.suspected:
                return
            self.suspected.add(rank)
        self.start(self._tell_lost, "NebulaLost", rank, why, after_s)

    def _tell_lost(self, rank: int, why: str, after_s: float) -> None:
        if not self.over.wait(after_s):
            self.on_lost(rank, why)

    # -- connections to the hubs

    def _reach(self, hub: int, again: bool) -> None:
        """Connects to a hub. again: it was heard before. A hub that lives accepts, and the port of a dead one refuses."""
        try:
            said = self._published(hub)
            if said is not None:
                self._add(self._connected(said), hub)
        except Exception as failure:
            if again:
                after_s = 0.0 if isinstance(failure, ConnectionRefusedError) else self.ears.doubt_s()
                self.suspect(hub, f"its connection has ended, and it accepts no other one ({failure})", after_s)
            else:
                _LOGGER.info("node %d cannot hear node %d, so only its heartbeats in storage count: %s", self.rank, hub, failure)

    def _published(self, hub: int) -> dict[str, Any] | None:
        deadline, pause = time.monotonic() + PUBLISHED_S, 0.1
        while not self.store.check([_key(self.number, hub)]):
            if time.monotonic() > deadline or self.over.wait(pause):
                return None
            pause = min(2 * pause, 2.0)
        found: dict[str, Any] = json.loads(self.store.get(_key(self.number, hub)))
        return found

    def _connected(self, said: dict[str, Any]) -> socket.socket:
        connection = socket.create_connection((said["address"], said["port"]), CONNECT_S)
        try:
            key, nonce = bytes.fromhex(said["key"]), os.urandom(NONCE)
            theirs, rank = _exactly(connection, NONCE), self.rank.to_bytes(4, "big")
            connection.sendall(rank + nonce + hmac.digest(key, b"node" + rank + theirs + nonce, hashlib.sha256))
            if not hmac.compare_digest(_exactly(connection, DIGEST), hmac.digest(key, b"hub" + nonce, hashlib.sha256)):
                raise ConnectionError("it does not know the key of this round")
        except BaseException:
            connection.close()
            raise
        return connection

    def _add(self, connection: socket.socket, rank: int) -> None:
        connection.setblocking(False)
        with self.lock:
            self.new.append((connection, rank))
        self._wake()

    # -- the thread that hears

    def _hear(self) -> None:
        try:
            if self.listener is not None:
                about = {"address": self.address, "port": self.listener.getsockname()[1], "key": self.key.hex()}
                self.store.set(_key(self.number, self.rank), json.dumps(about))
            while self.ears.turn():
                pass
        except Exception as failure:
            _LOGGER.warning("this node hears the others no more, so only heartbeats in storage count: %s", failure)
        finally:
            self.ears.close()


class _Ears:
    """The connections of a round, in the thread that uses them."""

    def __init__(self, round_: _Round) -> None:
        self.round = round_
        self.peers: dict[socket.socket, Peer] = {}
        self.greeting: dict[socket.socket, tuple[bytes, bytes, float]] = {}  # the nonce, what was read, and since when
        self.ended: dict[int, float] = {}  # nodes whose connection has ended, and when
        self.last, self.sent = time.monotonic(), 0.0

    def turn(self) -> bool:
        """Waits, hears and says. False: the round is over."""
        a = self.round
        sockets = [a.woken, *([a.listener] if a.listener else []), *self.peers, *self.greeting]
        poll = select.poll()
        by_fd = {}
        for each in sockets:
            poll.register(each, select.POLLIN)
            by_fd[each.fileno()] = each
        ready = [by_fd[fd] for fd, _ in poll.poll(a.interval_s * 500)]
        now = time.monotonic()
        self._forgive(now)
        for each in ready:
            if each is a.woken:
                with contextlib.suppress(BlockingIOError):
                    a.woken.recv(4096)
            elif each is a.listener:
                self._accept(now)
            elif each in self.greeting:
                self._greet(each, now)
            else:
                self._listen_to(each, now)
        with a.lock:
            if a.over.is_set():
                if a.has_changed:
                    self._say(CHANGED)
                return False
            new, a.new = a.new, []
            changed, a.has_changed = a.has_changed, False
        for connection, rank in new:
            self._take(connection, rank, now)
        if changed:
            self._say(CHANGED)
        if now - self.sent >= a.interval_s:
            self._say(ALIVE)
            self.sent = now
        self._judge(now)
        return True

    def close(self) -> None:
        for each in [*self.peers, *self.greeting, self.round.woken, self.round.waker, self.round.listener]:
            if each is not None:
                each.close()

    def _forgive(self, now: float) -> None:
        """If this process stood still, the others may have spoken: that time counts for none of them."""
        pause, self.last = now - self.last - self.round.interval_s, now
        if pause > self.round.interval_s:
            for peer in self.peers.values():
                peer.heard = min(now, peer.heard + pause)

    def _accept(self, now: float) -> None:
        with contextlib.suppress(OSError):
            connection = self.round.listener.accept()[0]  # type: ignore[union-attr]
            connection.setblocking(False)
            nonce = os.urandom(NONCE)
            connection.send(nonce)
            self.greeting[connection] = (nonce, b"", now)

    def _greet(self, connection: socket.socket, now: float) -> None:
        nonce, read, since = self.greeting[connection]
        piece = _piece(connection, GREETING - len(read))
        read += piece or b""
        if piece is None:
            del self.greeting[connection]
            connection.close()
            return
        self.greeting[connection] = (nonce, read, since)
        if len(read) < GREETING:
            return
        del self.greeting[connection]
        rank, theirs, digest = read[:4], read[4 : 4 + NONCE], read[4 + NONCE :]
        number = int.from_bytes(rank, "big")
        if number >= self.round.world or not hmac.compare_digest(
            digest, hmac.digest(self.round.key, b"node" + rank + nonce + theirs, hashlib.sha256)
        ):
            connection.close()
            return
        with contextlib.suppress(OSError):
            connection.send(hmac.digest(self.round.key, b"hub" + theirs, hashlib.sha256))
        self._take(connection, number, now)

    def _take(self, connection: socket.socket, rank: int, now: float) -> None:
        for old in [each for each, peer in self.peers.items() if peer.rank == rank]:
            del self.peers[old]
            old.close()
        self.ended.pop(rank, None)
        self.round.has_heard = True
        self.peers[connection] = Peer(rank, now, self.round.quiet_s, self.round.interval_s)

    def _listen_to(self, connection: socket.socket, now: float) -> None:
        piece = _piece(connection, 4096)
        if piece is None:
            rank = self.peers.pop(connection).rank
            connection.close()
            self.round.on_changed()  # it may have left
            if rank < self.round.rank and rank < HUBS:
                self.round.reach(rank, again=True)
            else:
                self.ended[rank] = now
            return
        if piece:
            self.peers[connection].hear(now)
        if CHANGED in piece:
            self.round.on_changed()
            if self.round.rank < HUBS:
                self._say(CHANGED, but=connection)

    def _say(self, what: bytes, but: socket.socket | None = None) -> None:
        for connection in self.peers:
            if connection is not but:
                with contextlib.suppress(OSError):  # its end is read, and its silence is noticed
                    connection.send(what)

    def _judge(self, now: float) -> None:
        for connection, since in [(each, known[2]) for each, known in self.greeting.items()]:
            if now - since > CONNECT_S:
                del self.greeting[connection]
                connection.close()
        for rank, since in list(self.ended.items()):
            if now - since > AGAIN_S:
                del self.ended[rank]
                self.round.suspect(rank, "its connection has ended")
        for connection, peer in list(self.peers.items()):
            if peer.is_silent(now):
                del self.peers[connection]
                connection.close()
                self.round.suspect(peer.rank, f"it has said nothing for {now - peer.heard:.1f} s", self.doubt_s())

    def doubt_s(self) -> float:
        """How long this node keeps a suspicion for itself."""
        if self.round.world == HUBS:
            return 0.0
        now, late_s = time.monotonic(), 2 * self.round.interval_s
        return 0.0 if any(now - peer.heard < late_s for peer in list(self.peers.values())) else self.round.quiet_s


def _piece(connection: socket.socket, most: int) -> bytes | None:
    """Returns what has arrived; b"": nothing. None: the connection has ended."""
    try:
        return connection.recv(most) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None


def _exactly(connection: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size:
        piece = connection.recv(size - len(read))
        if not piece:
            raise ConnectionError("it has closed the connection")
        read += piece
    return read
