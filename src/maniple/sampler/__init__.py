"""Samplers: which samples a worker trains on.

sampler          hands out samples, by fixed shares or by leases
leases           the table in shared memory that says which worker has which samples; `remote_leases` reaches it by TCP
position         how far workers with fixed shares are, for workers that come back and runs that are resumed
"""

from maniple.sampler.leases import Lease, LeaseTable, LeaseTerms, lease_size_for
from maniple.sampler.sampler import Lender, SampleOrder, Sampler, Shard

__all__ = ["Lease", "LeaseTable", "LeaseTerms", "Lender", "SampleOrder", "Sampler", "Shard", "lease_size_for"]
