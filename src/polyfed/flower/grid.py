"""Flower's grid, with two differences: what goes out is signed, and a damaged reply is its sender's fault alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import httpx
from flwr.app import Error, Metadata
from flwr.app import Message as FlowerMessage
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.superlink.grid import HttpGrid

from polyfed.flower.codec import seal

PIECES = 30.0  # seconds until all pieces of a reply that is announced must be there


class SiteGrid(HttpGrid):
    """Signs every message, and pulls each reply by itself.

    Attributes
    ----------
    sign
        What signs a message for the site of a node (None: a federation without keys).
    """

    sign: Callable[[int, str, bytes], Mapping[str, str | bytes]] | None = None

    def push_messages(self, messages: Iterable[FlowerMessage]) -> Iterable[str]:
        """Send messages, each signed for its site."""
        messages = list(messages)
        for message in messages if self.sign else ():
            assert self.sign is not None
            seal(message.content, partial(self.sign, message.metadata.dst_node_id))
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[FlowerMessage]:
        """Return the replies that are there; an error of Flower where one is damaged or stays incomplete."""
        found = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=message_ids))
        messages = []
        for about, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            if not about.metadata.reply_to_message_id:
                continue  # nobody was asked for it
            try:
                messages.append(self._whole(about, tree))
            except httpx.HTTPError:
                raise
            except Exception as error:  # pieces that are missing, or that are no message when put together
                messages.append(self._error(about, f"{type(error).__name__}: {error!s:.200}"))
        return messages

    def _whole(self, about: Any, tree: Any) -> FlowerMessage:
        """Fetch the pieces of a reply and put them together."""
        number, run = about.metadata.message_id, self.run.run_id
        pull = make_pull_object_fn_protobuf(
            pull_object_protobuf=self._runtime_client.PullObject, node=self.node, run_id=run
        )
        contents = pull_objects([part.object_id for part in iterate_object_tree(tree)], pull, max_time=PIECES)
        self._runtime_client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=number)
        )
        message = inflate_object_from_contents(number, contents)
        if not isinstance(message, FlowerMessage):
            raise TypeError(f"a {type(message).__name__} is no message")
        message.metadata.__dict__["_message_id"] = number
        message.metadata.__dict__["_reply_to_message_id"] = about.metadata.reply_to_message_id
        return message

    def _error(self, about: Any, why: str) -> FlowerMessage:
        return make_message(
            metadata=Metadata(
                run_id=self.run.run_id,
                message_id="",
                src_node_id=self.node.node_id,
                dst_node_id=self.node.node_id,
                message_type=SYSTEM_MESSAGE_TYPE,
                group_id="",
                ttl=0,
                reply_to_message_id=about.metadata.reply_to_message_id,
                created_at=now().timestamp(),
            ),
            error=Error(code=ErrorCode.MESSAGE_UNAVAILABLE, reason=why),
        )
