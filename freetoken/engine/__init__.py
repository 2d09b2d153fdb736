"""The engine: requests in, token ids out. Scheduling is pure; one coroutine drives the steps."""
