"""Writes to standard output whenever it runs, past Python's own buffers as a C library does. Right but for that."""

import os

from hyv4_kvdequant import GatherDequantBackend, load_backend


def banner(what):
    print(f"noisy: {what}, from Python", flush=True)
    os.write(1, f"noisy: {what}, from C\n".encode())


banner("imported")


class Backend(GatherDequantBackend):
    name = "noisy"

    @classmethod
    def unavailable_reasons(cls, target):
        banner("asked")
        return []

    def __init__(self, target):
        super().__init__(target)
        banner("made")
        self.right = load_backend("torch")(target)

    def gather_dequant(self, call):
        banner("called")
        self.right.gather_dequant(call)
