"""Connections to a host: requests over a link that reconnects, retries with backoff, and finding the host of a run."""
