"""Needs a module that is not there."""

import a_vendor_library_that_is_not_installed  # noqa: F401
