"""Measure: what a model costs."""

from narrowgate.measure.counts import summarize
from narrowgate.measure.summary import Layer, Summary, Uncounted, compare

__all__ = ["Layer", "Summary", "Uncounted", "compare", "summarize"]
