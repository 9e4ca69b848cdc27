"""Marks on what a served function returns."""

from __future__ import annotations

from typing import Any


class AnswerLater:
    """The answer is what this future will hold."""

    __slots__ = ("future",)

    def __init__(self, future: Any) -> None:
        self.future = future
