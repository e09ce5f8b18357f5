"""Waits for something that never comes."""

import threading

threading.Event().wait()
