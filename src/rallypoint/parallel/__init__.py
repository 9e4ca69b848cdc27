"""Layouts of parallel training: which rank stands where."""

from .layout import ParallelLayout


__all__ = ["ParallelLayout"]
