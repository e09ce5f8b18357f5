"""Made for a later version of the interface."""

from hyv4_kvdequant import GatherDequantBackend


class FutureBackend(GatherDequantBackend):
    api_version = 99
    name = "future"

    @classmethod
    def unavailable_reasons(cls, target):
        return []

    def gather_dequant(self, call):
        raise NotImplementedError
