"""Tests of freetoken.checkpoint."""
