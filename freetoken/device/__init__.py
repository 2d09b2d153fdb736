"""Devices: how a finished step wakes the loop, and what this machine has."""
