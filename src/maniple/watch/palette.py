"""Colours, the same wherever a run is drawn. Those of parts and runs can be told apart by the colour-blind too."""

PARTS = {"compute": "#4477aa", "exchange": "#ee6677", "data": "#ccbb44", "others": "#bbbbbb"}
# Of a run or worker, in turn.
CYCLE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d3b", "#7a7a7a")
# Of a rule, which is no run: lines in one colour, told apart by their strokes and the marks on them.
RULE, STROKES, MARKS = "#555555", ("-", "-.", ":", (0, (5, 1))), ("o", "s", "^", "D", "v", "P")


def colour(i: int) -> str:
    """The colour of number `i`."""
    return CYCLE[i % len(CYCLE)]
