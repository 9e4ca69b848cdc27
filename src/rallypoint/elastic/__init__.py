"""In-place recovery: when a process is lost, the others keep theirs, and training goes on at the step that was under way.

Import it before ``torch.distributed.init_process_group``: groups that are made afterwards can be kept.
"""

from rallypoint.errors import ElasticError, MembershipChanged

from . import process
from .meeting import Recovery
from .sampler import Sampler
from .session import Session, session


__all__ = ["ElasticError", "MembershipChanged", "Recovery", "Sampler", "Session", "session"]

process.begin()
