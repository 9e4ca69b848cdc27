"""What the supervisor does next: decisions only.

Theory of operation
-------------------
``decide(now, state, event)`` returns a new state, commands, and the reason in words. The shell
(:mod:`rallypoint.launch.supervisor`) gathers events and executes commands. It never decides.

::

    JOINING ──round formed──▶ RUNNING ──all ended well──▶ SWEEPING ──swept──▶ WAITING ──peers done──▶ ENDED
       ▲                         │ failure, here or on a peer; signal            (several nodes only)
       │                         │ (a symptom first: LISTENING, for a moment)
       │                         ▼
       └──── restart ──────── STOPPING ──all ended, or grace over──▶ SWEEPING ──swept──▶ ENDED

Rules:

1. One failure ends the generation for all nodes, because workers wait for each other in collectives.
2. The first event that ends a generation determines what follows it (``aim``). Later failures are consequences. A
   signal overrules a restart.
3. The restart budget belongs to the job. The round says how much of it is used, so all nodes agree. A failure is
   charged. In ``elastic`` jobs, a node that is lost, leaves or joins is not. A failure that reports only a lost peer (a
   *symptom*) is charged only if the next round misses no node and no node ended the generation for such a change. With
   ``restart_window``, older restarts no longer count. The round says how long ago each was.
4. A generation is over when it is ``swept``: none of its processes is left when the next one starts.
5. An elastic node whose workers have succeeded leaves at once. The node that serves the job's store (``serves``) stays
   until all others have finished, through all their rounds.
6. A worker in a session (``rallypoint.elastic``) survives its peers. If one fails while all others are in a session, or are
   starting in order to enter one, only that worker is replaced, and the others are told (``Replace``). At most ``max_losses`` are
   replaced in ``loss_window`` seconds, and none whose error occurred at the same step before. If a worker is not replaced, the
   reason is kept for people (``not_replaced``). With several nodes, all are told of the loss first (``TellLoss``). They read of
   losses in the same order, so they number them alike. A node that cannot keep its workers says so by failing; then all restart. In
   an elastic job this is not charged if nodes were lost together with what a newcomer needs: they are the cause.
7. If all workers of an elastic node are in a session, the loss of another node does not stop them: they are held
   (REJOINING) while the nodes meet again. If the round's plan says that all survivors keep their ranks and other nodes
   fill the free ones, the workers continue, and the newcomers' workers take the places of the lost ones. Otherwise all
   restart in the round that has formed. A node that the others have given up as lost (it was suspended or cut off)
   joins the round in the same way; if the round has formed without it, it ends its workers.
8. A symptom does not stop the other workers at once, because the one with the cause may still be cleaning up. For
   ``moment`` seconds the supervisor listens to them and asks which exceptions they handle. Then it sends SIGTERM.
9. The first signal stops the job. A second one ends it at once, unless it is a repeat: whatever passes signals on may deliver
   one twice.
"""

from __future__ import annotations

from .commands import (
    AskWorkers,
    Command,
    Decision,
    Finish,
    HoldWorkers,
    Join,
    KeepWorkers,
    PassOn,
    Replace,
    ReportRestart,
    SignalWorkers,
    StartWorkers,
    Sweep,
    TellLoss,
    TellPeers,
)
from .decide import decide, signal_name, start
from .events import (
    AdmissionAsked,
    Broken,
    Event,
    GraceOver,
    JobHangs,
    LeftOut,
    LossTold,
    NodeInSession,
    NodeWaiting,
    NotKept,
    NotNeeded,
    PeerFailed,
    PeerLeaves,
    PeerLost,
    PeersDone,
    PeersStopped,
    RoundFormed,
    SessionEntered,
    SessionExpected,
    SessionFixed,
    SessionLeft,
    SessionMet,
    SignalReceived,
    Swept,
    WorkerEnded,
)
from .sessions import why_nobody_is_admitted
from .state import Aim, Phase, State, Verdict, awaits_sessions, is_at_full_strength, is_past


__all__ = [
    "AdmissionAsked",
    "Aim",
    "AskWorkers",
    "Broken",
    "Command",
    "Decision",
    "Event",
    "Finish",
    "GraceOver",
    "HoldWorkers",
    "JobHangs",
    "Join",
    "KeepWorkers",
    "LeftOut",
    "LossTold",
    "NodeInSession",
    "NodeWaiting",
    "NotKept",
    "NotNeeded",
    "PassOn",
    "PeerFailed",
    "PeerLeaves",
    "PeerLost",
    "PeersDone",
    "PeersStopped",
    "Phase",
    "Replace",
    "ReportRestart",
    "RoundFormed",
    "SessionEntered",
    "SessionExpected",
    "SessionFixed",
    "SessionLeft",
    "SessionMet",
    "SignalReceived",
    "SignalWorkers",
    "StartWorkers",
    "State",
    "Sweep",
    "Swept",
    "TellLoss",
    "TellPeers",
    "Verdict",
    "WorkerEnded",
    "awaits_sessions",
    "decide",
    "is_at_full_strength",
    "is_past",
    "signal_name",
    "start",
    "why_nobody_is_admitted",
]
