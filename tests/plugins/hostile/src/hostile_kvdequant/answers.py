"""Backends whose answers break the contract."""

from hyv4_kvdequant import GatherDequantBackend


class _Answers(GatherDequantBackend):
    @classmethod
    def unavailable_reasons(cls, target):
        return []

    def gather_dequant(self, call):
        raise NotImplementedError


class ReasonsNone(_Answers):
    name = "reasons-none"

    @classmethod
    def unavailable_reasons(cls, target):
        return None


class ReasonsString(_Answers):
    name = "reasons-string"

    @classmethod
    def unavailable_reasons(cls, target):
        return "only on Tuesdays"


class ReasonsRaise(_Answers):
    name = "reasons-raise"

    @classmethod
    def unavailable_reasons(cls, target):
        raise ZeroDivisionError("no cores")


class InitRaises(_Answers):
    name = "init-raises"

    def __init__(self, target):
        raise OSError("the device is busy")


class InitString(_Answers):
    name = "init-string"

    def __init__(self, target):
        return "ready"  # noqa: PLE0101 - that is the point


class InitNone(_Answers):
    name = "init-none"

    def __new__(cls, target):
        return None
