"""polyfed: federated learning for parties with different neural networks.

The public names are listed in `__init__.pyi`; they are imported on first use, so `import polyfed` is instant.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
