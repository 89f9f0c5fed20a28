"""Planning: memory, batches, pipeline and network traffic of a job before it is started.

``plan`` answers for given settings, ``suggest`` looks for settings. Nothing here imports torch.
"""

from smp_config.machine.gpus import Gpu
from smp_config.machine.instances import Instance, instance, instances
from smp_estimator.planning.batches import Batches, Epochs, batch_for, batches, batches_of
from smp_estimator.planning.forecast import Verdict
from smp_estimator.planning.known_models import named_shape
from smp_estimator.planning.memory.kinds import Kind
from smp_estimator.planning.model_shape import SHAPES, ModelShape
from smp_estimator.planning.plan import Plan, plan
from smp_estimator.planning.request import Workload
from smp_estimator.planning.search.clusters import Cluster
from smp_estimator.planning.search.improvement import Improvement
from smp_estimator.planning.search.suggest import Suggestion, suggest
from smp_estimator.planning.step_time import StepCost, StepTime, Training

__all__ = [
    "SHAPES",
    "Batches",
    "Cluster",
    "Epochs",
    "Gpu",
    "Improvement",
    "Instance",
    "Kind",
    "ModelShape",
    "Plan",
    "StepCost",
    "StepTime",
    "Suggestion",
    "Training",
    "Verdict",
    "Workload",
    "batch_for",
    "batches",
    "batches_of",
    "instance",
    "instances",
    "named_shape",
    "plan",
    "suggest",
]
