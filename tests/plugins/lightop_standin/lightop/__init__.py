"""A stand-in for Hygon's LightOp, for the tests of hyv4-kvdequant. It is not LightOp and shares no code with it.

It was written from what public callers of LightOp show: the op's name, where it is looked for, its arguments, and what
it is said to write. `LIGHTOP_STANDIN_FACE` chooses which LightOp it looks like:

| face | what it looks like |
| --- | --- |
| six_arguments | an older build: a built-in without a signature, six positional arguments, in `lightop.op` |
| newer | a signature with `dedup_table` and `reuse_compact_indices`, in `lightop.op` |
| public_category | as newer, but listed by `lightop.attention` and gone from `lightop.op` |
| public_and_raw | in both; the one in `lightop.op` must not be called |
| dedup | as newer; stores a slot once a request and leaves every row that no index points to full of NaN |
| raises | as newer, but a TypeError comes out of the op itself |
| without_op | a release that has no such op |
| unknown_signature | the op needs an argument that nobody has told us of |
| moved_argument | the op takes what we know, in another order |
| import_error, os_error, missing_dependency | the package does not load |
| category_error | the category that lists the op does not load |
"""

import os

FACE = os.environ["LIGHTOP_STANDIN_FACE"]

print("a vendor library that prints while it is imported")

if FACE == "import_error":
    raise ImportError("undefined symbol: _ZN3c104cuda9SetDeviceEi")
if FACE == "os_error":
    raise OSError("libgalaxyhip.so.5: cannot open shared object file: No such file or directory")
if FACE == "missing_dependency":
    import a_module_that_nobody_has  # noqa: F401
