"""polyfed: federated learning for parties with different neural networks.

The public names are listed in `__init__.pyi`; they are imported on first use, so `import polyfed` is instant.
"""

import os

import lazy_loader

# Before MKL's first call: on some processors it rounds a product by where its matrices begin in memory, unless it is
# told not to: a client's numbers would depend on its place in a stack (docs/decisions/0021-where-a-matrix-begins.md).
os.environ.setdefault("MKL_CBWR", "AUTO")

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
