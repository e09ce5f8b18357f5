"""Ends the process that imports it."""

import sys

sys.exit("exiting_import: no licence found")
