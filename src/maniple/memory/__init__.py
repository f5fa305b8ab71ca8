"""Shared memory: segments that several processes map, locks inside of them, and futexes to wait on."""
