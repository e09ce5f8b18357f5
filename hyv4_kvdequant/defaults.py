"""Defaults and rules that the command line's help shows; apart, so that showing them imports nothing."""

NAME_RULE = "a lower-case letter, then lower-case letters, digits, '-' or '_'"
"""What a backend's name is."""

BENCH_RUNS = 100
REPLAY_RUNS = 30

IMPORT_TIMEOUT_S = 20.0
"""Seconds that one backend may take to import and to say whether it can run."""

START_UP_TIMEOUT_S = 60.0
"""The same where a host starts up: a vendor's library on a cold network file system takes its time."""
