"""Raises what `except Exception` does not catch."""


class Stop(BaseException):
    pass


raise Stop("no such device [/]")
