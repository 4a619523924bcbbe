"""Networks made of networks: fusing, matching and distilling, for `pf.fuse` and the one-shot methods alike."""

from polyfed.fusion.blockdiag import fuse_blockdiag
from polyfed.fusion.distill import Distillation
from polyfed.fusion.files import fuse_files, load_fused
from polyfed.fusion.fusing import METHODS, fuse
from polyfed.fusion.matching import accuracy_of
from polyfed.fusion.networks import score_on
from polyfed.ops.matching import Matching

__all__ = [
    "METHODS",
    "Distillation",
    "Matching",
    "accuracy_of",
    "fuse",
    "fuse_blockdiag",
    "fuse_files",
    "load_fused",
    "score_on",
]
