"""Addresses, before Flower meets them: can the server listen, and does a site find a server? Flower would not say."""

from __future__ import annotations

import errno
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime

import httpx

from polyfed.flower.child import Address, LinkError
from polyfed.flower.gate import CLOCKS, MARK
from polyfed.flower.keys import SiteKeys

PATIENCE = 5.0  # seconds for one answer
PAUSE = 2.0  # seconds between two attempts
REMIND = 30.0  # seconds between two sentences about it
ADVICE = "check host and port, that 'polyfed serve' runs there, and that no firewall is in between"


def check_free(address: Address) -> None:
    """Refuse an address on which this process cannot listen."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise LinkError(f"Port {address.port} is in use: choose another one with --port.") from error
            raise LinkError(
                f"Cannot listen on {address} ({error.strerror}): --host is an address of this machine, and a --port "
                "below 1024 needs special rights."
            ) from error


def wait_for_server(server: str, keys: SiteKeys | None, limit: float, say: Callable[[str], None]) -> None:
    """Return as soon as a polyfed server answers; say what is there instead, at once and repeatedly.

    Raises
    ------
    LinkError
        When the time is over, or when trying again is of no use.
    """
    start = time.monotonic()
    told, told_at = "", 0.0
    while (found := look(server, keys)) is not None:
        now = time.monotonic()
        left = start + limit - now
        if left <= 0:
            raise LinkError(f"No polyfed server at {server} in {limit:.0f} s ({found}): {ADVICE}.")
        if found != told or now - told_at >= REMIND:
            told, told_at = found, now
            say(f"No polyfed server at {server} yet ({found}); trying for {left:.0f} s more: {ADVICE}.")
        time.sleep(min(PAUSE, left))


def look(server: str, keys: SiteKeys | None) -> str | None:
    """Return None if a polyfed server answers, else what is there instead, in words.

    Raises
    ------
    LinkError
        When what is there is not the server that our keys belong to.
    """
    verify = ssl.create_default_context(cafile=keys.authority) if keys else False
    before = time.time()
    try:
        response = httpx.get(f"{'https' if keys else 'http'}://{server}/", verify=verify, timeout=PATIENCE)
    except httpx.HTTPError as error:
        return _words(server, error)
    if MARK not in response.headers:
        return f"something else answers there, with HTTP status {response.status_code}"
    if keys is not None and (wrong := wrong_clock(response.headers.get("date", ""), before, time.time())):
        raise LinkError(
            f"The clock of this machine is {wrong} that of {server}, and calls are signed with their time: set both "
            f"right (at most {CLOCKS} seconds apart), then join again."
        )
    return None


def wrong_clock(told: str, before: float, after: float) -> str | None:
    """Return how far our clock is off, by what the server's said in between (to the second), if that is too far."""
    try:
        theirs = parsedate_to_datetime(told).timestamp()
    except ValueError:
        return None  # it does not say
    if before - (theirs + 1) > CLOCKS:
        return f"{before - theirs:.0f} seconds ahead of"
    return f"{theirs - after:.0f} seconds behind" if theirs - after > CLOCKS else None


def _words(server: str, error: httpx.HTTPError) -> str:
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise LinkError(
                f"{server} does not have the certificate that our ca.crt vouches for ({cause.verify_message}): check "
                "the address, and that the keys in this folder belong to this federation."
            ) from error
        if isinstance(cause, ssl.SSLError):
            raise LinkError(f"{server} does not speak TLS: is it the right port, and not --insecure?") from error
        if isinstance(cause, socket.gaierror):
            return "this host name is not known here"
        if isinstance(cause, ConnectionRefusedError):
            return "nothing listens on this port"
    if isinstance(error, httpx.TimeoutException):
        return f"no answer in {PATIENCE:.0f} s"
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return "something listens there, but does not speak as our server does; one with keys needs --keys"
    return str(error) or type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
