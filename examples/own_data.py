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
result = pf.run("fedproto", clients, ["mlp:1x32", "mlp:2x32", "mlp:3x32"], rounds=5)
print(result.table())
