"""Have code that imports ``torch.distributed.rpc`` run on Rallypoint, unmodified.

import rallypoint.compat
rallypoint.compat.install()      # before anything imports torch.distributed.rpc's functions
...
rallypoint.compat.uninstall()
"""

from .modules import install, installed, is_installed, uninstall


__all__ = ["install", "installed", "is_installed", "uninstall"]
