"""Feeds: producers push minibatches, workers take them. `ring` is the queue in shared memory, `remote` reaches it over
TCP, `prefetch` is a producer for one worker alone.
"""
