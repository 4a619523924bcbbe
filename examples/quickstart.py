"""Ten clients with three different networks learn together on handwritten digits. Runs in a few seconds."""

import polyfed as pf

data = pf.load("digits")
clients = pf.split(data, clients=10, by=pf.Dirichlet(0.3), seed=0, public=200)
models = ["mlp:1x64", "mlp:2x64", "cnn:16-32"]
training = pf.Training(epochs=3, batch_size=16, lr=0.05, momentum=0.9)

alone = pf.run("local", clients, models, rounds=5, training=training)
together = pf.run(pf.FedMD(digest_epochs=3), clients, models, rounds=5, training=training)

print(together.table())
print(f"alone {alone.accuracy()['mean']:.1%}, together {together.accuracy()['mean']:.1%}")
print(f"each client sent {together.cost.bytes['up'][0]:,} bytes in all, and no weights and no images")
