"""Add your own method in one file: a frozen dataclass whose fields are its hyper-parameters.

This one sends class-mean logits (as FedDistill does) and pulls each client's outputs towards the others'. It also runs
from the command line, in the folder that has `examples`:

polyfed run --method examples.own_method:LabelLogits --data digits --models mlp:1,cnn:16-32 --epochs 3 --lr 0.2
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

import polyfed as pf


@dataclass(frozen=True)
class LabelLogits(pf.Method):
    """Exchange the mean logits of each class.

    Parameters
    ----------
    weight
        Strength of the pull; 0 gives local training exactly.
    """

    name: ClassVar[str] = "label_logits"
    sends: ClassVar[str] = "one mean logit vector for each class"
    needs: ClassVar[frozenset[str]] = frozenset({"classes"})

    weight: float = 0.1

    # --- server ---
    def send(self, server, info, step, ctx):
        """Send the mean logits, once there are some."""
        return pf.Message(data={"logits": server.memory["logits"]} if "logits" in server.memory else {})

    def fuse(self, server, replies, step, ctx):
        """Average over the clients that hold a class."""
        total = sum(reply.data["logits"] * reply.data["held"].unsqueeze(1) for reply in replies.values())
        held = sum(reply.data["held"] for reply in replies.values())
        server.memory["logits"] = total / held.clamp(min=1).unsqueeze(1)

    # --- client ---
    def loss(self, nets, batch, aux):
        """Return cross-entropy plus the distance to the mean logits of the true class. Must be pure."""
        logits = nets["main"](batch.x)
        pull = F.mse_loss(logits, aux["target"][batch.y])
        return batch.loss(logits) + self.weight * aux["on"] * pull

    def local(self, client, step, ctx):
        """Train, then tell the mean logits of each class."""
        target = client.inbox.data.get("logits")
        nothing = torch.zeros(ctx.num_classes, ctx.num_classes)
        aux = {"target": nothing if target is None else target, "on": torch.tensor(float(target is not None))}
        yield pf.Stage(self.loss, aux=aux)
        with torch.no_grad():
            logits = client.main.eval()(client.train.inputs())
        one_hot = F.one_hot(client.train.labels(), ctx.num_classes).float()
        counts = one_hot.sum(0)
        means = one_hot.T @ logits / counts.clamp(min=1).unsqueeze(1)
        return pf.Message(data={"logits": means, "held": (counts > 0).float()})


if __name__ == "__main__":
    clients = pf.split("digits", clients=8, seed=0)
    models = ["mlp:1", "mlp:2", "cnn:16-32"]
    training = pf.Training(epochs=3, batch_size=16, lr=0.05, momentum=0.9)

    alone = pf.run("local", clients, models, rounds=6, training=training)
    together = pf.run(LabelLogits(weight=0.1), clients, models, rounds=6, training=training)

    print(together.table())
    print(f"alone {alone.accuracy()['mean']:.1%}, together {together.accuracy()['mean']:.1%}")
