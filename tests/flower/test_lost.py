"""A message that Flower loses on its way does not end a site: whoever still wants an answer asks again."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import problem
import pytest
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError
from flwr.supercore.task_identity import TaskIdentity

from polyfed.flower import link as flower
from polyfed.flower.codec import pack
from polyfed.flower.join import Attendance, Joining
from polyfed.flower.site import Site

PULLS = [ObjectPullError("piece", "gone"), RuntimeError("No messages received")]
PUSHES = [ObjectPushError("piece", 1, "session")]


class Link:
    """A connection with these messages."""

    keys = child = None

    def __init__(self, heads):
        self.heads = heads

    def alive(self):
        return True

    def connected(self):
        return True

    def lost(self):
        return False

    @contextmanager
    def task(self):
        yield flower.Task(SimpleNamespace(PushTaskOutput=lambda request: None, head=self.heads[0]))


@pytest.mark.parametrize("pulls, pushes", [(PULLS, []), ([], PUSHES)], ids=["pulled", "pushed"])
def test_a_lost_message_does_not_end_a_site(pulls, pushes, monkeypatch, tmp_path):
    heads = [{"kind": "name"}, {"kind": "end", "reason": ""}]
    link, replies, pulls, pushes = Link(heads), [], list(pulls), list(pushes)

    def pull(client):
        if pulls:
            raise pulls.pop()
        return Message(pack(client.head), 1, "query.name"), None, None, None

    def push(client, message, context):
        if pushes:
            raise pushes.pop()
        replies.append(message)
        heads.pop(0)

    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(flower, "pull_task_input", pull)
    monkeypatch.setattr(flower, "push_message", push)
    said = []
    site = Site("north", "mlp:1x8", problem.part(0), tmp_path, say=said.append)
    attendance = Attendance(link, site, Joining("127.0.0.1:1", None, "north", Path(tmp_path)), said.append)
    assert attendance.run() == 0
    assert len(replies) == 2 and not pulls and not pushes
    assert any("The federation has ended" in line for line in said)
