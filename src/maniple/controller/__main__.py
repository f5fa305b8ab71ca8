"""`python -m maniple.controller FD...`: the server's process."""

from maniple.controller.process import main

main()
