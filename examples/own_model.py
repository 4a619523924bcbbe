"""Bring your own torch module: one call gives polyfed the cut points that some methods need."""

from torch import nn

import polyfed as pf


class MyNetwork(nn.Module):
    """An ordinary torch module that knows nothing of polyfed."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU())
        self.classifier = nn.Linear(32, num_classes)

    def forward(self, x):
        """Return the logits."""
        return self.classifier(self.body(x))


def my_network(num_classes: int) -> nn.Module:
    """Name the last layer; its input is what prototype methods call the features."""
    return pf.adapt(MyNetwork(num_classes), head="classifier", input_shape=(1, 8, 8))


clients = pf.split("digits", clients=6, by="dirichlet:1.0", seed=0)
models = [my_network, "cnn:16-32", "mlp:1x64"]
training = pf.Training(epochs=3, batch_size=16, lr=0.05, momentum=0.9)

# Our network and the CNN have 32 features, the MLP has 64: feature_dim brings all of them to 32.
alone = pf.run("local", clients, models, rounds=5, training=training, feature_dim=32)
together = pf.run(pf.FedProto(lam=1.0), clients, models, rounds=5, training=training, feature_dim=32)

print(together.table())
print(f"alone {alone.accuracy()['mean']:.1%}, together {together.accuracy()['mean']:.1%}")
