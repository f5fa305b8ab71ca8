"""A serial program whose functions run on all workers of this machine.

pool              the workers, and the calls that a program makes
function          a function of whole data sets: the rows of each worker, and what each process executes of one call
outputs           reduction of what the workers return
data              arrays in shared memory, and objects of which each worker has its own
training          one training step on all workers
processes         the worker processes as the caller sees them
worker_process    the program they run, and how messages are pickled
gather_kernels    fast copies of rows
"""

from maniple.pool.data import Data, Handle
from maniple.pool.function import Function
from maniple.pool.pool import Pool

__all__ = ["Data", "Function", "Handle", "Pool"]
