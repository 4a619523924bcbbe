"""`python -m polyfed.cli`."""

from polyfed.cli import main

main()
