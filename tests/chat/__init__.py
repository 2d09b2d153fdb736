"""Tests of freetoken/chat."""
