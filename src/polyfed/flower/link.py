"""The two ends of a Flower connection: the only file that touches Flower's inside.

Flower usually starts one process for each message and runs whatever code the server sent along (the FAB). Here
`polyfed serve` and `polyfed join` take that place themselves: they start SuperLink or SuperNode in process isolation,
claim the waiting task as Flower's own executor would, and exchange messages with it. So no code of the server is ever
installed or run at a site, nothing is started for a message, and a step takes a fraction of a second.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message as FlowerMessage
from flwr.app import RecordDict
from flwr.common.constant import SubStatus
from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest, UnregisterNodeRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.inflatable.inflatable_object import UnexpectedObjectContentError
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError, ObjectUnavailableError
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message

from polyfed.flower.child import Address, Child, LinkError, free_port, last_line
from polyfed.flower.gate import SECRET_HEADER
from polyfed.flower.keys import ServerKeys, SiteKeys
from polyfed.flower.signing import Seal
from polyfed.flower.supernode import hasten

START = 60.0  # seconds until a Flower process must answer
HEARTBEAT = 10.0  # seconds between two signs of life of a claimed task; Flower forgets a task after 30
PATIENCE = 20.0  # seconds of retries until SuperLink counts as gone
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
LOSSES = (ObjectPullError, ObjectPushError, ObjectUnavailableError, UnexpectedObjectContentError, RuntimeError)

# A FAB must exist for Flower to have a run; it holds no code, and nobody here opens it.
_FAB = b"""[project]
name = "polyfed"
version = "0.0.0"
description = "A polyfed federation: no code travels."
dependencies = []
[tool.flwr.app]
publisher = "polyfed"
[tool.flwr.app.components]
serverapp = "polyfed:none"
clientapp = "polyfed:none"
"""


class _Secret:
    """Adds the secret that opens Control to a request."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def intercept(self, context: Any, call_next: Any) -> Any:
        context.request.headers[SECRET_HEADER.decode()] = self.secret
        return call_next(context)


class Heartbeat:
    """Tells Flower from time to time that a claimed task is being worked on."""

    def __init__(self, client: RuntimeHttpClient) -> None:
        self.client = client
        self.end = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.thread.start()

    def _beat(self) -> None:
        while not self.end.is_set():
            with contextlib.suppress(httpx.HTTPError):
                self.client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            self.end.wait(HEARTBEAT)

    def stop(self) -> None:
        """Stop beating."""
        self.end.set()
        self.thread.join(HEARTBEAT)


class ServerLink:
    """SuperLink as a child process, the sites' keys registered, and a grid to send messages to them."""

    def __init__(self, bind: Address, keys: ServerKeys | None, folder: Path, max_bytes: int) -> None:
        self.bind = bind
        self.keys = keys
        self.folder = folder
        self.max_bytes = max_bytes
        self.certificates = keys.authority.read_bytes() if keys else None
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind.host, bind.host)
        self.address = str(Address(local, bind.port))
        self.names: dict[int, str] = {}  # Flower's number of a node -> the site whose key it proved to have

    def open(self) -> ServerLink:
        """Start everything.

        Raises
        ------
        LinkError
            When SuperLink does not start, usually because the port is in use.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        os.chmod(self.folder, 0o700)
        secret, executor = secrets.token_hex(32), secrets.token_hex(32)
        _secret_file(self.folder / "control.secret", secret)
        _secret_file(self.folder / "executor.secret", executor)
        arguments = ["--secret-file", str(self.folder / "control.secret"), "--max-bytes", str(self.max_bytes)]
        arguments += ["--host", self.bind.host, "--port", str(self.bind.port), "--isolation", "process"]
        arguments += ["--superexec-auth-secret-file", str(self.folder / "executor.secret")]
        arguments += ["--disable-runtime-dependency-installation"]
        if self.keys is None:
            arguments.append("--insecure")
        else:
            arguments += ["--ssl-certfile", str(self.keys.certificate), "--ssl-keyfile", str(self.keys.private_key)]
            arguments += ["--ssl-ca-certfile", str(self.keys.authority), "--enable-supernode-auth"]
        self.child = Child("superlink", arguments, self.folder / "superlink.log")
        try:
            self._enter(secret, executor)
        except BaseException:
            self.child.stop()
            raise
        return self

    def _enter(self, secret: str, executor: str) -> None:
        """Register the sites, start the run and claim it."""
        self.control = control = ControlHttpClient.from_server_address(
            self.address,
            self.keys is None,
            self.certificates,
            [RuntimeVersionHttpInterceptor("flwr CLI"), _Secret(secret)],
        )
        from flwr.cli.build import build_fab_from_files  # heavy imports that a site does not need

        from polyfed.flower.grid import SiteGrid

        hasten()
        fab, _ = build_fab_from_files({"pyproject.toml": _FAB})
        self._wait_for(lambda: control.StartRun(StartRunRequest(fab=Fab(content=fab))))
        for name, public in (self.keys.sites if self.keys else {}).items():
            self._register(name, public)
        token = _claim(self._client(_executor(executor)), TaskType.SERVER_APP)
        if token is None:
            raise LinkError(f"SuperLink has no task for us; its log is {self.child.log}.")
        self.client = self._client(RuntimeTokenHttpInterceptor(token))
        given = self.client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        self.heartbeat = Heartbeat(self.client)
        self.grid = SiteGrid(self.address, self.keys is None, self.certificates, token=token)
        if self.keys is not None:
            server = Seal(self.keys)
            self.grid.sign = lambda node, text, blob: server.sign(self.names[node], text, blob)
        self.grid._retry_invoker.max_time = PATIENCE  # SuperLink is our own child: it is there, or it is gone
        self.grid.set_run(run_from_proto(given.run))

    def _wait_for(self, call: Any) -> Any:
        end = time.monotonic() + START
        while True:
            try:
                return call()
            except httpx.TransportError as error:
                if not self.child.alive():
                    raise LinkError(f"SuperLink ended at once: {last_line(self.child.words())}") from error
                if time.monotonic() > end:
                    raise LinkError(
                        f"SuperLink did not start in {START:.0f} s; its log is {self.child.log}."
                    ) from error
                time.sleep(0.1)

    def _client(self, *interceptors: Any) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            self.address,
            self.keys is None,
            self.certificates,
            [RuntimeVersionHttpInterceptor("polyfed"), *interceptors],
        )

    def nodes(self) -> dict[int, str]:
        """Return the nodes that are connected now, each with the moment when it connected."""
        if not self.child.alive():
            raise LinkError(f"SuperLink ended: {last_line(self.child.words())}")
        return {node.node_id: node.last_activated_at for node in self.grid.get_nodes()}

    def _register(self, name: str, public: bytes) -> None:
        if public:  # else its key was revoked
            self.names[self.control.RegisterNode(RegisterNodeRequest(public_key=public)).node_id] = name

    def change_keys(self, sites: Mapping[str, bytes]) -> list[str]:
        """Shut out revoked keys and let in new ones of our sites; return the sites whose keys changed."""
        assert self.keys is not None
        changed = [name for name, public in self.keys.sites.items() if sites.get(name, b"") != public]
        for name in changed:
            for node in [node for node, site in self.names.items() if site == name]:
                self.control.UnregisterNode(UnregisterNodeRequest(node_id=node))
                del self.names[node]
            self._register(name, sites.get(name, b""))
        self.keys = replace(self.keys, sites={name: sites.get(name, b"") for name in self.keys.sites})
        return changed

    def close(self) -> None:
        """End the run and SuperLink."""
        self.control.close()
        with contextlib.suppress(httpx.HTTPError):
            self.client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.COMPLETED))
        self.heartbeat.stop()
        self.grid.close()
        self.client.close()
        self.child.stop()


class SiteLink:
    """SuperNode as a child process, and the tasks that it has for us."""

    def __init__(self, server: str, keys: SiteKeys | None, folder: Path) -> None:
        self.server = server
        self.keys = keys
        self.folder = folder
        self.child: Child | None = None

    def open(self) -> None:
        """Start SuperNode; it connects and reconnects by itself."""
        self.folder.mkdir(parents=True, exist_ok=True)
        os.chmod(self.folder, 0o700)
        hasten()
        executor = secrets.token_hex(32)
        _secret_file(self.folder / "executor.secret", executor)
        self.address = Address("127.0.0.1", free_port())
        arguments = ["--superlink", self.server, "--host", self.address.host, "--port", str(self.address.port)]
        arguments += ["--isolation", "process"]
        arguments += ["--superexec-auth-secret-file", str(self.folder / "executor.secret")]
        if self.keys is None:
            arguments.append("--insecure")
        else:
            arguments += ["--root-certificates", str(self.keys.authority)]
            arguments += ["--auth-supernode-private-key", str(self.keys.private_key)]
        (self.folder / "supernode.log").write_bytes(b"")
        self.child = Child("supernode", arguments, self.folder / "supernode.log")
        self.client = self._client(_executor(executor))

    def alive(self) -> bool:
        """Tell whether SuperNode runs."""
        return self.child is not None and self.child.alive()

    def connected(self) -> bool:
        """Tell whether the server has let SuperNode in since it started."""
        return self.child is not None and b"SuperNode ID:" in (self.folder / "supernode.log").read_bytes()

    def lost(self) -> bool:
        """Tell whether SuperNode's last attempt to reach the server failed."""
        words = self.words()
        return words.rfind("Connection attempt failed") > words.rfind("Connection successful")

    def words(self) -> str:
        """Return the end of SuperNode's log."""
        return self.child.words() if self.child else ""

    @contextlib.contextmanager
    def task(self) -> Iterator[Task | None]:
        """Claim the next message, or None if there is none now.

        Raises
        ------
        httpx.HTTPError
            When SuperNode is not there (not yet, or no longer).
        MessageLost
            When it dropped the message.
        """
        token = _claim(self.client, TaskType.CLIENT_APP)
        if token is None:
            yield None
            return
        client = self._client(RuntimeTokenHttpInterceptor(token))
        heartbeat = Heartbeat(client)
        try:
            yield Task(client)
        finally:
            heartbeat.stop()
            client.close()

    def _client(self, *interceptors: Any) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            str(self.address), True, None, [RuntimeVersionHttpInterceptor("polyfed"), *interceptors]
        )

    def close(self) -> None:
        """End SuperNode; it tells the server that this site leaves."""
        if self.child is not None:
            self.client.close()
            self.child.stop()
            self.child = None


class MessageLost(LinkError):
    """SuperNode dropped a message while we talked, as it does when the server stops; who still wants it asks again."""


class Task:
    """One message that waits for our reply."""

    def __init__(self, client: RuntimeHttpClient) -> None:
        self.client = client
        try:
            self.message, self.context, _, _ = pull_task_input(client)
        except LOSSES as error:
            raise MessageLost(f"A message was lost: {error}") from error

    def reply(self, content: RecordDict) -> None:
        """Hand the reply to SuperNode, which carries it to the server."""
        reply = FlowerMessage(content, reply_to=self.message)
        try:
            push_message(self.client, reply, self.context)
        except LOSSES as error:
            raise MessageLost(f"A reply was lost: {error}") from error
        self.client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.COMPLETED))


def _claim(client: RuntimeHttpClient, kind: TaskType) -> str | None:
    """Claim the oldest waiting task of a kind and return its token."""
    found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
    return found.token or None


def _executor(secret: str) -> SuperExecAuthHttpInterceptor:
    return SuperExecAuthHttpInterceptor(master_secret=secret.encode(), protected_methods={ACQUIRE})


def _secret_file(path: Path, secret: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret)
