"""The clusters that start several supervisors of one job, each in a file of its own."""

from .cluster import Cluster, ClusterLevel, Placement
from .detection import detect
from .variables import ClusterVariables


__all__ = ["Cluster", "ClusterLevel", "ClusterVariables", "Placement", "detect"]
