"""Bring your own data: parties whose data is separate already, as arrays, torch data sets or files."""

import numpy as np

import polyfed as pf

rng = np.random.default_rng(0)


def a_hospital(patients: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Twelve measurements of each patient, and whether the patient is ill."""
    ill = rng.integers(0, 2, patients)
    measurements = rng.normal(size=(patients, 12)) + ill[:, None] * np.linspace(0, 1, 12) + shift
    return measurements.astype(np.float32), ill


clients = pf.Clients.from_parts(
    [a_hospital(40, 0.0), a_hospital(200, 0.3), a_hospital(90, -0.2)],
    test=a_hospital(300, 0.0),
    class_names=["healthy", "ill"],
)
print(clients.describe())
models = ["mlp:1x32", "mlp:2x32", "mlp:3x32"]
training = pf.Training(epochs=3, batch_size=16, lr=0.05, momentum=0.9)

alone = pf.run("local", clients, models, rounds=5, training=training)
together = pf.run("fedproto", clients, models, rounds=5, training=training)

print(together.table())
print(f"alone {alone.accuracy()['mean']:.1%}, together {together.accuracy()['mean']:.1%}")
