"""The processes of torch's launcher, as each other sees them: how they meet, talk, and end with a sentence."""

from __future__ import annotations

import atexit
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from polyfed.core.checkpoint import Tree
from polyfed.core.errors import InputError, PolyfedError, RankGone
from polyfed.core.launch import local_rank, local_world_size, was_restarted, world_size
from polyfed.engines.parcels import LONGEST, described, empty, filled, opened, parcels, read, tree_of

PATIENCE = timedelta(days=7)  # a rank waits while rank 0 fuses; one that died closes its connection at once
GLOO, NCCL = "gloo", "cpu:gloo,cuda:nccl"
MOMENT = timedelta(seconds=1)  # for a rank that may be gone
WORDS = "last words"  # in the store: whether somebody says why this start ends


# The launcher's store, and the part of it that belongs to this start, once this process has met the others.
_stores: list[tuple[Store, Store]] = []


class Link:
    """The other processes: trees of tensors, numbers and words go to one of them, or come from one."""

    def __init__(self, device: torch.device, out: str | Path | None) -> None:
        if not dist.is_initialized():
            _stores.append(_meet(device))
        self.store, self.own = _stores[0]
        self.out = out
        self.number = dist.get_rank()
        self.size = dist.get_world_size()
        # Where tensors from other GPUs arrive; None: all of them go by way of the processors' memory.
        self.gpu = device if "nccl" in str(dist.get_backend_config()) else None
        self.device = device
        self.talking = False
        self.ended = False

    def send(self, to: int, tree: Tree) -> None:
        """Send a tree to a rank."""
        words, tensors, items = described(tree, self.gpu is not None)
        with self.talk(to):
            dist.send(torch.tensor([len(words)]), to)
            dist.send(torch.frombuffer(bytearray(words), dtype=torch.uint8), to)
            for numbers in parcels(items):
                parcel = filled([tensors[number] for number in numbers], [items[number] for number in numbers])
                for piece in pieces(parcel):
                    dist.send(piece, to)

    def receive(self, source: int) -> Tree:
        """Wait for a tree from a rank."""
        length = torch.zeros(1, dtype=torch.int64)
        with self.talk(source):
            dist.recv(length, source)
            words = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(words, source)
            skeleton, items = read(words.numpy().tobytes())
            tensors: dict[int, torch.Tensor] = {}
            for numbers in parcels(items):
                some = [items[number] for number in numbers]
                parcel = empty(some, self.gpu)
                for piece in pieces(parcel):
                    dist.recv(piece, source)
                parcel = parcel.to(self.device) if some[0].by_memory else parcel
                tensors.update(zip(numbers, opened(parcel, some), strict=True))
        return tree_of(skeleton, tensors)

    def swap(self, trees: Sequence[Tree]) -> Iterator[Tree]:
        """Send each other rank its tree and yield what each of them sends: all of them do this at the same time."""
        for turn in range(self.size):  # in each turn everybody has one partner, or none; the lower number speaks first
            other = (turn - self.number) % self.size
            if self.number < other:
                self.send(other, trees[other])
            if self.number != other:
                yield self.receive(other)
            if self.number > other:
                self.send(other, trees[other])

    def begun(self, out: str | Path) -> bool:
        """Tell whether an earlier start of these processes began the run in this directory.

        torch's own count of restarts is that of one machine: it stays where it is when a process of another one died.

        Raises
        ------
        InputError
            When one did, and the directory is not there: its rounds would be lost without a word.
        """
        key = f"begun/{out}"
        noted = self.store.check([key]) and not self.own.check([key])
        if (Path(out) / "config.json").is_file():
            return noted or was_restarted()
        if noted:
            raise InputError(
                f"This run had begun in {out}, which is not there any more: --out has to be on a file system that all "
                "machines share, since rank 0 may be on another one after each start."
            )
        return False

    def begin(self, out: str | Path) -> None:
        """Note that the run in this directory has begun: later starts go on with it."""
        for store in (self.own, self.store):
            store.set(f"begun/{out}", "")

    def end(self, *_: Any) -> None:
        """Follow the launcher's request to end: it ends all processes a moment after one of them has died.

        Talking to a rank that died, or that is ended too, fails by itself and then says which one it was. A rank above
        0 that is at work dies at once, since rank 0 may wait for it to say so; but not where rank 0 itself is gone.
        """
        self.ended = True
        if self.talking:
            return
        if self.number > 0 and not self.lost(0):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        raise self._ended()

    def lost(self, rank: int) -> bool:
        """Tell whether a rank is gone without a word: listen for a moment; there is no talking to it afterwards."""
        try:
            heard = dist.irecv(torch.zeros(1, dtype=torch.int64), rank)
            assert heard is not None
            heard.wait(MOMENT)
        except RuntimeError as error:
            return "timed out" not in str(error).lower()
        return False

    def has_the_word(self) -> bool:
        """Tell whether this rank says why the run ends: the first of all that asks."""
        try:
            return self.own.add(WORDS, 1) == 1
        except RuntimeError:  # the launcher's store is gone too, with its machine: one process of each other one
            return local_rank() == 0

    def hang_up(self) -> None:
        """Stop talking for good: the others end, wherever they are, and leave the last words to this rank.

        Telling them so would not do: one that waits for its answer to be heard hears nothing.
        """
        self.has_the_word()
        dist.destroy_process_group()

    def gone(self, rank: int) -> PolyfedError:
        """Return the sentence about a rank that died."""
        return RankGone(f"Rank {rank} of this run is gone: look for its last words above. {self._go_on()}")

    def _ended(self) -> PolyfedError:
        return PolyfedError(
            f"The launcher ended this run, since a rank is gone or it was told to stop. {self._go_on()}"
        )

    def _go_on(self) -> str:
        if self.out is None:
            return "Nothing is kept: use --out DIR to be able to go on."
        return f"Go on with 'polyfed resume {self.out}' (torchrun with --max-restarts does so by itself)."

    @contextmanager
    def talk(self, rank: int) -> Iterator[None]:
        """Send or receive inside the block; what fails there names the rank."""
        self.talking = True
        try:
            yield
        except RuntimeError as error:
            raise self.gone(rank) from error
        finally:
            self.talking = False
        if self.ended:
            raise self._ended()


def _meet(device: torch.device) -> tuple[Store, Store]:
    """Connect to the other processes and return the launcher's key-value store, and the part of this start.

    The launcher keeps it when it starts all processes again, with all that dead ones wrote; so each start gets a part
    of it to itself.
    """
    store, rank, size = next(rendezvous("env://", timeout=PATIENCE))
    store = PrefixStore("polyfed", store)
    own = PrefixStore(common_word(store, rank, size), store)
    there = torch.cuda.device_count() if device.type == "cuda" else 0
    own.set(f"transport/{rank}", transport(device, there, local_world_size()))
    told = {own.get(f"transport/{other}").decode() for other in range(size)}  # waits for those who did not say yet
    backend = told.pop() if len(told) == 1 else GLOO
    if backend == NCCL:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=PATIENCE)
    atexit.register(_leave, own, rank)
    return store, own


def _leave(own: Store, rank: int) -> None:
    """Close the connections; rank 0 has said by now whatever there is to say."""
    if rank == 0:
        with suppress(RuntimeError):
            own.add(WORDS, 1)
    if dist.is_initialized():
        dist.destroy_process_group()


def common_word(store: Store, rank: int, size: int) -> str:
    """Return a word that all processes of this start have in common, and those of an earlier one had not.

    Counting them would not do: some may have died before they came here. Rank 0 gives its word to everybody whose own
    it finds, until they say that they have it; what the dead left there is answered, too, and nobody reads it.
    """
    mine = uuid4().hex
    store.set(f"here/{rank}", mine)
    if rank > 0:
        word = store.get(f"word-for/{mine}").decode()  # waits for rank 0
        store.set(f"heard/{word}/{rank}", "")
        return word
    for other in range(1, size):
        while not store.check([f"heard/{mine}/{other}"]):
            if store.check([f"here/{other}"]):
                store.set(f"word-for/{store.get(f'here/{other}').decode()}", mine)
            time.sleep(0.02)
    return mine


def transport(device: torch.device, gpus: int, processes: int) -> str:
    """Return by what tensors travel, as torch names it: NCCL between GPUs, where each process of a machine has its own.

    Examples
    --------
    >>> transport(torch.device("cpu"), gpus=4, processes=4)
    'gloo'
    >>> transport(torch.device("cuda:1"), gpus=4, processes=4)
    'cpu:gloo,cuda:nccl'
    >>> transport(torch.device("cuda:1"), gpus=2, processes=4)  # NCCL refuses two processes on one GPU
    'gloo'
    """
    return NCCL if device.type == "cuda" and gpus >= processes else GLOO


def pieces(parcel: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a parcel in pieces that one transfer can take: none if it is empty."""
    return parcel.split(LONGEST) if len(parcel) else ()


def join(device: torch.device, out: str | Path | None) -> Link | None:
    """Return the link to the other processes of the launcher, or None where this one is alone."""
    return Link(device, out) if world_size() > 1 else None


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


@contextmanager
def deaf() -> Iterator[None]:
    """Let Ctrl-C pass by this process: rank 0 finishes the round with its help, and then tells it to stop."""
    try:
        earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread: signals stay as they are
        yield
        return
    yield  # where the block fails this process ends, and Ctrl-C has nothing left to stop
    signal.signal(signal.SIGINT, earlier)
