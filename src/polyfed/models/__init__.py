"""Models: the contract, the zoo by name, and adapters for any module."""

from polyfed.models import (  # noqa: F401  (importing them fills the registry)
    cnn,
    estimators,
    mlp,
    others,
    resnet,
    sequences,
    tabular,
    wrn,
)
from polyfed.models.adapt import adapt
from polyfed.models.contract import Model, check_model, count_parameters, parameter_parts, properties, signature
from polyfed.models.project import with_feature_dim
from polyfed.models.registry import build, describe, describe_one, names, register
from polyfed.models.vtc import Decoder
from polyfed.models.width import Scaler, activate_scalers, channel_index, levels, scaled

__all__ = [
    "Decoder",
    "Model",
    "Scaler",
    "activate_scalers",
    "adapt",
    "build",
    "channel_index",
    "check_model",
    "count_parameters",
    "describe",
    "describe_one",
    "levels",
    "names",
    "parameter_parts",
    "properties",
    "register",
    "scaled",
    "signature",
    "with_feature_dim",
]
