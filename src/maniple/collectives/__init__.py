"""Collective calls: reductions, broadcast, gather and scatter over shared memory, torch.distributed or MPI."""
