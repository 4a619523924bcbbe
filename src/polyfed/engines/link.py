"""The processes of torch's launcher, as each other sees them: how they meet, talk, and end with a sentence."""

from __future__ import annotations

import atexit
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from polyfed.core.checkpoint import Tree, pack_tree, unpack_tree
from polyfed.core.errors import PolyfedError
from polyfed.core.launch import world_size

PATIENCE = timedelta(days=7)  # a rank waits while rank 0 fuses; one that died closes its connection at once
PIECE = 1 << 30  # bytes in one transfer
GO_ON = "go on with 'polyfed resume' and the --out of the run (torchrun with --max-restarts does so by itself)."


class Link:
    """The other processes: trees of tensors, numbers and words go to one of them, or come from one."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            _meet()
        self.number = dist.get_rank()
        self.size = dist.get_world_size()
        self.talking = False
        self.ended = False

    def send(self, to: int, tree: Tree) -> None:
        """Send a tree to a rank."""
        blob = torch.frombuffer(bytearray(pack_tree(tree)), dtype=torch.uint8)
        with self.talk(to):
            dist.send(torch.tensor([len(blob)]), to)
            for piece in blob.split(PIECE):
                dist.send(piece, to)

    def receive(self, source: int) -> Tree:
        """Wait for a tree from a rank."""
        length = torch.zeros(1, dtype=torch.int64)
        with self.talk(source):
            dist.recv(length, source)
            blob = torch.empty(int(length), dtype=torch.uint8)
            for piece in blob.split(PIECE):
                dist.recv(piece, source)
        return unpack_tree(blob.numpy().tobytes(), f"a message from rank {source}")

    def end(self, *_: Any) -> None:
        """Follow the launcher's request to end: it ends all processes a moment after one of them has died.

        Talking to a rank that died, or that is ended too, fails by itself and then says which one it was.
        """
        self.ended = True
        if not self.talking:
            raise _ended()

    @contextmanager
    def talk(self, rank: int) -> Iterator[None]:
        """Send or receive inside the block; what fails there names the rank."""
        self.talking = True
        try:
            yield
        except RuntimeError as error:
            raise _gone(rank) from error
        finally:
            self.talking = False
        if self.ended:
            raise _ended()


def _meet() -> None:
    """Connect to the other processes.

    The launcher keeps its key-value store when it starts all processes again, with the addresses of the dead ones in
    it; so each start gets a part of the store to itself, counted by how many processes have come so far.
    """
    store, rank, size = next(rendezvous("env://", timeout=PATIENCE))
    start = (store.add("polyfed/arrivals", 1) - 1) // size
    own = PrefixStore(f"polyfed/{start}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=PATIENCE)
    atexit.register(dist.destroy_process_group)


def join() -> Link | None:
    """Return the link to the other processes of the launcher, or None where this one is alone."""
    return Link() if world_size() > 1 else None


@contextmanager
def ending_in_words(link: Link) -> Iterator[None]:
    """Let this process say why the run ends when the launcher ends all processes (SIGTERM)."""
    try:
        earlier = signal.signal(signal.SIGTERM, link.end)
    except ValueError:  # not the main thread: signals stay as they are
        yield
        return
    try:
        yield
    except BaseException:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # we are ending; what is still to be said is said first
        raise
    signal.signal(signal.SIGTERM, earlier)


def _gone(rank: int) -> PolyfedError:
    return PolyfedError(f"Rank {rank} of this run is gone: look for its last words above, then {GO_ON}")


def _ended() -> PolyfedError:
    return PolyfedError(f"The launcher ended this run, since a rank is gone or it was told to stop: {GO_ON}")
