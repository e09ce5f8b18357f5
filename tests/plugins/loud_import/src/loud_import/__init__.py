"""Greets whoever imports it. Right but for that."""

from hyv4_kvdequant import GatherDequantBackend

print('{"loud": "a banner on standard output"}')


class LoudBackend(GatherDequantBackend):
    name = "loud"

    @classmethod
    def unavailable_reasons(cls, target):
        return ["this plugin is for tests and serves nothing", "and it has a second reason"]

    def gather_dequant(self, call):
        raise NotImplementedError
