"""In-place recovery: when a worker is lost, the others keep running, and training resumes at the step that was under way.

Import it before calling ``torch.distributed.init_process_group``: groups created after the import can be kept.
"""

from rallypoint.errors import ElasticError, MembershipChanged

from .loops.sampler import Sampler
from .recovery.meeting import Recovery
from .session import Session, session
from .worker import process


__all__ = ["ElasticError", "MembershipChanged", "Recovery", "Sampler", "Session", "session"]

process.begin()
