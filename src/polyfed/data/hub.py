"""The Hugging Face Hub: first its cache on this machine, then the network, with a quick answer when there is none."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from polyfed.core.errors import InputError
from polyfed.data.catalog import TEST_NAMES, TRAIN_NAMES, hub_cache_folders
from polyfed.data.tables import Table, table_of

PATIENCE = 4.0  # seconds to wait for the Hub to answer at all; `datasets` alone retries for half a minute

_offline_flag = threading.Lock()


class NotOnThisMachine(Exception):
    """The Hub data set is not in the cache, and the Hub cannot be asked; says why."""


def fetch(hub: str, config: str | None = None, revision: str | None = None, test: str | None = None) -> list[Table]:
    """Return the training and test tables of a Hub data set (only one if it has no test part).

    Raises
    ------
    NotOnThisMachine
        If it is neither in the Hub's cache nor to be had from the network.
    InputError
        If it has no training part.
    """
    splits = _from_cache(hub, config, revision)
    if splits is None:
        reason = why_unreachable()
        if reason:
            raise NotOnThisMachine(reason)
        try:
            splits = _load(hub, config, revision)
        except Exception as error:  # the library raises many kinds; the sentence for people is the same
            raise NotOnThisMachine(f"the Hub answered: {type(error).__name__}: {_first_line(error)}") from error
    train = next((splits[name] for name in TRAIN_NAMES if name in splits), None)
    if train is None:
        raise InputError(f"The Hub data set '{hub}' has no split 'train', only {', '.join(splits)}.")
    tables = [table_of(train, f"{hub} (train)")]
    for name in (test, *TEST_NAMES):
        if name in splits:
            return [*tables, table_of(splits[name], f"{hub} ({name})")]
    return tables


def is_offline() -> bool:
    """Say whether the environment forbids asking the Hub."""
    yes = ("1", "TRUE", "YES", "ON")
    return any(os.environ.get(name, "").upper() in yes for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))


def why_unreachable() -> str | None:
    """Return None if the Hub (or the proxy before it) accepts a connection within a few seconds, else the reason."""
    if is_offline():
        return "HF_HUB_OFFLINE is set"
    target = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    proxy = getproxies().get(target.scheme)
    if proxy and not proxy_bypass(target.hostname or ""):
        target = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    host, port = target.hostname or "", target.port or (80 if target.scheme == "http" else 443)
    answer: list[str | None] = [f"{host} did not answer within {PATIENCE:.0f} s"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=PATIENCE).close()
            answer[0] = None
        except OSError as error:
            answer[0] = f"{host} cannot be reached: {error.strerror or error}"

    # In a thread, because looking up a host name has no time limit of its own.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return answer[0]


def _from_cache(hub: str, config: str | None, revision: str | None) -> Any:
    if not any(hub_cache_folders(hub)):
        return None
    with _without_network():
        try:
            return _load(hub, config, revision)
        except Exception:
            return None  # another configuration, or half a download: ask the Hub


def _load(hub: str, config: str | None, revision: str | None) -> Any:
    """Call the library (tests replace this)."""
    import datasets  # type: ignore[import-untyped]

    return datasets.load_dataset(hub, config, revision=revision)


@contextmanager
def _without_network() -> Iterator[None]:
    """Make `datasets` use its cache only; it has no argument for that, only this module constant."""
    import datasets

    with _offline_flag:
        before = datasets.config.HF_HUB_OFFLINE
        datasets.config.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            datasets.config.HF_HUB_OFFLINE = before


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0].rstrip(".")
