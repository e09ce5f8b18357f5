"""A public category that has nothing to do with the op, and does not load."""

raise OSError("libgemm.so: cannot open shared object file: No such file or directory")
