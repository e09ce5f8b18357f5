"""Claims the name of another distribution's backend. Right but for that."""

from acme_kvdequant import AcmeBackend as _AcmeBackend


class AcmeBackend(_AcmeBackend):
    pass
