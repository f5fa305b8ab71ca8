"""A serial program whose functions run on all workers of this machine.

pool      the workers, and what a person does with them
function  a function of whole data sets: `calling` is what each process does of a call
rows      who takes which rows; `outputs` puts together what came of them
data      arrays in shared memory; `objects` are those that each worker has for itself
crew      the worker processes, each of which is `served`; `box` is what travels, `memory` where large arrays lie
"""

from maniple.pool.data import Data
from maniple.pool.function import Function
from maniple.pool.objects import Handle
from maniple.pool.pool import Pool

__all__ = ["Data", "Function", "Handle", "Pool"]
