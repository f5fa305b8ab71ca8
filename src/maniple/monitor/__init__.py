"""State of a run, understood from the rows in its folder, while it is running or afterwards.

`RunState` follows all rows with bounded memory: the state of each worker, totals, series and time splits. `measures`
declares every number that is shown of them; `target` is a value to reach, `baseline` what a speed-up is measured over.
"""

from maniple.monitor.run_state import Overall, RunState, Totals
from maniple.monitor.series import CENTER, NamedSeries, Series
from maniple.monitor.worker_state import WorkerState

__all__ = ["CENTER", "NamedSeries", "Overall", "RunState", "Series", "Totals", "WorkerState"]
