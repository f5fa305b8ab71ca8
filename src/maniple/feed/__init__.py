"""Feeds: producers push minibatches, workers take them.

local_feed           `maniple.Feed` and `worker.feed()`, and both ends of a ring in shared memory
remote_feed          both ends over TCP, and the host's side
ring                 the queue in shared memory, and the format of a batch
producer_registry    which producers are alive, have ended or failed
prefetch             a loader process for one worker alone
batch_files          prepared batches in the files of a folder
"""
