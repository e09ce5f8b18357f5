"""A/B of two backends: a shadow on live traffic, traces of it, and replay of traces offline."""
