"""Exchanges between two workers without a center, through mailboxes in shared memory at the host."""
