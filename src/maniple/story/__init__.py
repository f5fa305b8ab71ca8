"""The story: what became of a run, understood from the rows in its folder, while it goes on or afterwards.

`Story` follows all rows with bounded memory. `standing` tells where each worker stands, `totals` what they achieve
together now, `overall` what they have achieved since they began; `curves`, `lanes` and `clock` are for those who draw
it.
"""

from maniple.story.curves import CENTER, Curves
from maniple.story.overall import Overall, look_back
from maniple.story.series import Series
from maniple.story.standing import Standing
from maniple.story.story import Story
from maniple.story.totals import Totals

__all__ = ["CENTER", "Curves", "Overall", "Series", "Standing", "Story", "Totals", "look_back"]
