"""Serving hosts: where a host's attention is intercepted. A new host is a new file here, and a line in `plugin`."""
