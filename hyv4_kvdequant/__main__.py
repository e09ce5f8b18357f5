"""`python -m hyv4_kvdequant` is the command line."""

from hyv4_kvdequant.cli import main

main()
