"""How often something is timed unless told otherwise; apart, so that the command line's help needs no PyTorch."""

BENCH_RUNS = 100
REPLAY_RUNS = 30
