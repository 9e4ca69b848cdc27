"""Run code that imports ``torch.distributed.rpc`` on Rallypoint, unmodified::

import rallypoint.compat

rallypoint.compat.install()  # before any import of functions from torch.distributed.rpc
...
rallypoint.compat.uninstall()
"""

from .modules import install, installed, is_installed, uninstall


__all__ = ["install", "installed", "is_installed", "uninstall"]
