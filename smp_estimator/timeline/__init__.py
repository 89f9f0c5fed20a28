"""The parts of ``smp-estimator timeline``: read the ranks' files, measure, trace, draw."""

from smp_estimator.timeline.files import read_timeline
from smp_estimator.timeline.steps import Block, JobTimeline, RankStep, Step

__all__ = ["Block", "JobTimeline", "RankStep", "Step", "read_timeline"]
