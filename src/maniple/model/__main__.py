"""python -m maniple.model FILE.py:CLASS"""

from maniple.model.command import main

main()
