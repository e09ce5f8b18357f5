"""Raises what a user's Ctrl-C raises."""

raise KeyboardInterrupt
