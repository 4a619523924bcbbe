"""Hyper-parameters that nobody sets are those of the papers and their programs."""

import pytest

from polyfed.methods import make

DEFAULTS = {
    "fedprox": {"mu": 0.1, "straggler_share": 0.0},
    "scaffold": {"option": "auto", "server_lr": 1.0, "weighting": "uniform"},
    "fednova": {"gmf": 0.0, "mu": 0.0, "weighting": "samples"},
    "moon": {"mu": 1.0, "temperature": 0.5, "previous": 1},
    "inclusivefl": {"beta": 0.2, "delay": 0, "share_head": True, "share_top": False},
    "inco": {"rule": "code", "theta_max": 5.0, "clip": 0.1, "mu": 0.0},
    "depthfl": {"alpha": 0.1, "ramp": 300, "temperature": 1.0, "kd": True, "feddyn": True, "weighting": "uniform"},
    "heterofl": {"scaler": True, "static_bn": True, "mask": True, "clip": 1.0, "weighting": "uniform"},
    "heterofl_dynamic": {"mix": "a1-b1-c1-d1-e1", "decay": "heterofl", "clip": 1.0},
    "fedrolex": {"extraction": "rolling", "stride": 1, "direction": 1},
    "fjord": {"widths": (0.2, 0.4, 0.6, 0.8, 1.0), "kd": False, "weighting": "samples", "mask": False, "clip": None},
    "scalefl": {"gamma": 0.05, "temperature": 3.0, "start": 0.25, "official": False, "mask": False, "clip": None},
    "fiarse": {"sizes": (1.0, 1 / 4, 1 / 16, 1 / 64), "scope": "model", "server_lr": 1.0, "weighting": "uniform"},
    "fedmrl": {"d1": None, "m_g": 1.0, "m_k": 1.0, "projector": "trained", "weighting": "samples"},
    "fedl2g": {"form": "logit", "guide_weight": 1.0, "server_clip": 100.0, "warm_up": 50}
    | {"quiz_batches": 1, "study_batches": 1},
    "takfl": {"temperature": 3.0, "self_temperature": 20.0, "self_weight": 0.01, "candidates": 15, "distill_epochs": 5}
    | {"distill_optimizer": "adam", "distill_lr": 1e-5, "distill_weight_decay": 5e-5, "distill_batch": 128}
    | {"weighting": "samples"},
    "dsfl": {"temperature": 0.1, "aggregation": "era", "space": "prob", "digest_loss": "ce"},
    "fens": {"combiner": "mlp", "hidden": 2, "combiner_rounds": 500, "combiner_lr": 1.0, "combiner_batch": 128}
    | {"server_lr": 1e-3, "beta_1": 0.9, "beta_2": 0.99, "held_out": 0.1, "l1": 0.0},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name):
    method = make(name)
    assert {field: getattr(method, field) for field in DEFAULTS[name]} == DEFAULTS[name]
