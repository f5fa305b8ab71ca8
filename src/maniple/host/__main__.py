"""`python -m maniple.host FD...`: the server process, with the descriptors of its listening sockets."""

from maniple.host.server_process import main

main()
