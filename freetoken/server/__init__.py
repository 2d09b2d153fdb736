"""The HTTP side: OpenAI routes, control routes, streams. No torch, no engine internals."""
