"""temporary"""
from .coordination import LoneNode
def coordination_for(config, say):
    return LoneNode()
