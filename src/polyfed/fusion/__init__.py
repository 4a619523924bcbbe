"""Networks made of networks: fusing, matching and distilling, for `pf.fuse` and the one-shot methods alike."""

from polyfed.fusion.fusing import (
    METHODS,
    Distillation,
    Matching,
    accuracy_of,
    fuse,
    fuse_blockdiag,
    fuse_files,
    load_fused,
)

__all__ = ["METHODS", "Distillation", "Matching", "accuracy_of", "fuse", "fuse_blockdiag", "fuse_files", "load_fused"]
