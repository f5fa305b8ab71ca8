"""The samplers: which samples a worker trains on. `sampler` hands them out, `table` says who has which."""

from maniple.sampler.lease import Lease, Terms, chunk_for
from maniple.sampler.sampler import Lender, Order, Sampler, Shard
from maniple.sampler.table import Table

__all__ = ["Lease", "Lender", "Order", "Sampler", "Shard", "Table", "Terms", "chunk_for"]
