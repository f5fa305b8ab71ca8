"""The circle: the workers as equals, where all meet at once. `shared` on one machine, `torch` and `mpi` beyond it."""
