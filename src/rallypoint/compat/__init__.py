"""Run code that imports ``torch.distributed.rpc`` on Rallypoint, unmodified.

Install it before anything imports functions from ``torch.distributed.rpc``::

    import rallypoint.compat

    rallypoint.compat.install()
    ...
    rallypoint.compat.uninstall()
"""

from .modules import install, installed, is_installed, uninstall


__all__ = ["install", "installed", "is_installed", "uninstall"]
