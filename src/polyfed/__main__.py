"""`python -m polyfed`, and `torchrun -m polyfed`."""

from polyfed.cli import main

main()
