"""What a type checker sees of the public names (`make check` reads this file; it is not run)."""

from typing import assert_type

import polyfed as pf

clients = pf.split(pf.load("digits"), clients=3, by=pf.Dirichlet(0.5))
assert_type(clients, pf.Clients)
training = pf.Training(epochs=1, lr=0.1)
assert_type(training.lr, float)
result = pf.run(pf.FedProto(lam=0.5), clients, ["mlp:1", "mlp:2"], rounds=1, training=training)
assert_type(result, pf.Result)
pf.run(pf.FedAvg(), clients, rounds="three")  # type: ignore[arg-type]
