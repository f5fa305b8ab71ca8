"""`python -m maniple.cli`."""

from maniple.cli import main

main()
