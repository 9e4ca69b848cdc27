"""In-place recovery: when a process is lost, the others keep theirs, and training goes on at the step that was under way.

Import it before ``torch.distributed.init_process_group``: groups that are made afterwards can be kept.
"""

from rallypoint.errors import ElasticError, MembershipChanged

from .loops.sampler import Sampler
from .recovery.meeting import Recovery
from .session import Session, session
from .worker import process


__all__ = ["ElasticError", "MembershipChanged", "Recovery", "Sampler", "Session", "session"]

process.begin()
