"""What torch's launcher says about this process: `torchrun` starts several of them, each with a rank.

Only the environment is read, so that the command line can ask without loading torch.
"""

from __future__ import annotations

import os


def world_size() -> int:
    """Return how many processes were started together (1: this one is alone)."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def rank() -> int:
    """Return the number of this process among them; number 0 runs the round loop and writes all files."""
    return int(os.environ.get("RANK", "0")) if world_size() > 1 else 0


def local_rank() -> int:
    """Return the number of this process among those on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0")) if world_size() > 1 else 0


def local_world_size() -> int:
    """Return how many of them are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if world_size() > 1 else 1


def was_restarted() -> bool:
    """Tell whether the launcher started all processes again after one of them had died."""
    return world_size() > 1 and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
