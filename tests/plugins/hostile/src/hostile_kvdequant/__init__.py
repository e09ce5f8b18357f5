"""Backends that misbehave: while they are imported, in what they answer, or on standard output."""
