"""Is killed by a signal while it is imported, as a library with a wild pointer is."""

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
