"""The entry point that vLLM calls in every process (group `vllm.general_plugins`).

vLLM swallows an exception raised while this module is imported, and lets one raised by `register` stop the
start-up. So nothing here can fail on import, and all work is inside the function.
"""

import os


def register() -> None:
    """Reads the settings and, with the gate on, hooks the hosts. Safe to call any number of times.

    Raises:
        ConfigurationError: an unknown variable that is ours or nearly ours, or a value that cannot be read, gate on or
            off or misspelt.
        BackendError: the gate is on and the named backend is not installed or does not load.
        HostError: the gate is on and a host's attention is not what this release knows.
    """
    from hyv4_kvdequant.variables import is_like_ours

    # Nobody who has set none of our variables pays for more than this line.
    if not any(map(is_like_ours, os.environ)):
        return
    from hyv4_kvdequant.hosts.start_up import start_up

    start_up()
