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
    "feddf": {"ensemble": "logits", "distill_optimizer": "adam", "distill_lr": 1e-3, "distill_batch": 128}
    | {"distill_clip": 5.0, "distill_cosine": True, "temperature": 1.0, "check_every": 100, "patience": 1000},
    "fedmd": {"digest_loss": "l1", "digest_epochs": 1},
    "feddistill": {"lam": 1.0, "leave_one_out": True},
    "fedgen": {"alpha": 10.0, "beta": 10.0, "decay": 0.98, "diversity": 1.0, "noise_dim": 32, "hidden": 256}
    | {"generator_steps": 50, "generator_batch": 32, "generator_lr": 3e-4, "generator_weight_decay": 1e-2},
    "dafkd": {"temperature": 10.0, "samples": 5 * 128, "distill_batch": 128, "distill_epochs": 5, "distill_lr": 1e-5}
    | {"penalty": 0.3, "noise_dim": 100, "discriminator_rounds": 3, "generator_rounds": 5},
    "msfkd": {"rho": 0.5, "kappa": 0.9, "temperature": 1.0, "distill_lr": 0.01, "selector": "entropy"},
    "fedgd": {"bn_weight": 10.0, "label_weight": 0.5, "adversarial_weight": 1.0, "synthesis_batch": 256, "width": 64}
    | {"generator_steps": 10, "syntheses": 10, "warm_up": 2, "generator_lr": 2e-3, "noise_lr": 0.01, "noise_dim": 256}
    | {"temperature": 20.0, "distill_steps": 400 // 8, "distill_lr": 0.01, "distill_momentum": 0.9},
    "fedproto": {"lam": 1.0, "weighting": "samples", "collect": "after", "predict_with": "head"},
    "fedtgp": {"lam": 10.0, "server_epochs": 100, "margin_threshold": 100.0, "predict_with": "prototype"},
    "fedgh": {"server_epochs": 1},
    "lg_fedavg": {"keep": 1},
    "ccvr": {"form": "server", "when": "final", "covariance": "full", "head_epochs": 10, "ridge": 1e-4},
    "fml": {"alpha": 0.5, "beta": 0.5, "weighting": "uniform"},
    "fedkd": {"e_0": 0.95, "e_1": 0.98, "detach_scale": True},
    "fedtype": {"alpha": 0.1, "k_reg": 5, "lam_proxy": 0.5, "lam_private": 1.0, "temperature": 1.0, "finish": True},
    "pfedafm": {"mixing": 1.0, "mixing_lr": 0.01, "weighting": "samples", "common_epochs": None},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name):
    method = make(name)
    assert {field: getattr(method, field) for field in DEFAULTS[name]} == DEFAULTS[name]
