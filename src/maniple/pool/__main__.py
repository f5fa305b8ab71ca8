"""A worker process: python -m maniple.pool LINK LIFE SEGMENT RANK WORLD."""

from maniple.pool.served import main

main()
