"""The samplers: which samples a worker trains on. `sampler` hands them out, `table` says who has which."""

from maniple.sampler.sampler import Lender, Order, Sampler, Shard
from maniple.sampler.table import Lease, Table, Terms, chunk_for

__all__ = ["Lease", "Lender", "Order", "Sampler", "Shard", "Table", "Terms", "chunk_for"]
