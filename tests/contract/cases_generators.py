"""Methods whose server trains a generator."""

from tests.contract.case import WIDTHS, Case

FEDGEN = {"hidden": 8, "noise_dim": 4, "generator_steps": 3, "generator_batch": 4, "alpha": 1.0, "beta": 1.0}
DAFKD = {"noise_dim": 4, "width": 2, "samples": 12, "distill_epochs": 2, "distill_lr": 1e-3}
DAFKD_OFF = {"distill_epochs": 0, "discriminator_rounds": 0, "generator_rounds": 0}
FEDGD = {
    "noise_dim": 4,
    "width": 2,
    "synthesis_batch": 6,
    "generator_steps": 2,
    "syntheses": 2,
    "warm_up": 1,
    "distill_steps": 2,
}

CASES = [
    Case("fedgen", ("mlp:1x16",), FEDGEN, off={"alpha": 0.0, "beta": 0.0}, base="fedavg"),
    Case(
        "fedgen",
        options={**FEDGEN, "share": "head"},
        feature_dim=8,
        off={"alpha": 0.0, "beta": 0.0},
        base="lg_fedavg",
    ),
    Case("fedgen_hetero", WIDTHS, FEDGEN, off={"alpha": 0.0, "beta": 0.0}, base="heterofl"),
    Case("dafkd", ("cnn:4-8",), DAFKD, off=DAFKD_OFF, base="fedavg"),
    Case("dafkd", ("mlp:1x16",), {**DAFKD, "discriminator_rounds": 1}, off=DAFKD_OFF, base="fedavg"),
    Case("dafkd_hetero", WIDTHS, DAFKD, off=DAFKD_OFF, base="heterofl"),
    Case("fedgd", WIDTHS, FEDGD, off={"distill_steps": 0}, base="heterofl", base_options={"static_bn": False}),
]
