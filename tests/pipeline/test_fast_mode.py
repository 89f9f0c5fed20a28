"""What ``fast_mode`` predicts of the values that travel between stages, and what happens where values decide."""

from __future__ import annotations


def _varies(settings_say):
    """A module whose output's shape depends on values, after two calls that agreed."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    class Selecting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x)[x[:, 0] > 0]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.select, self.head = Selecting(), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(self.select(x)).sum()

    torch.manual_seed(0)
    model = smp.DistributedModel(Net())
    smp.set_partition(model.module.select, 1)

    @smp.step
    def train(x):
        loss = model(x)
        model.backward(loss)
        return loss

    losses = []
    for step in range(8):
        x = torch.ones(4, 4)
        x[0 : step // 4 + (step == 7), 0] = -1
        try:
            losses.append(float(train(x).reduce_mean()))
        except Exception as error:
            return losses, str(error)
    with torch.no_grad():
        weights = model.state_dict()
    return losses, weights


def test_a_shape_that_depends_on_values_is_an_error_that_names_the_setting(ranks):
    settings = {"partitions": 2, "auto_partition": False, "default_partition": 0}
    for losses, text in ranks(_varies, 2, None, config=settings, timeout=120):
        assert len(losses) == 4
        assert "module 'select' returned" in text
        assert '"fast_mode": False' in text


def test_without_fast_mode_shapes_may_depend_on_values(ranks):
    settings = {"partitions": 2, "auto_partition": False, "default_partition": 0, "fast_mode": False}
    for losses, weights in ranks(_varies, 2, None, config=settings, timeout=120):
        assert len(losses) == 8
        assert isinstance(weights, dict)
        assert losses[7] != losses[6] != losses[0]


def _asked(steps, counted):
    """What a chain over three stages learns, and how often this rank asks for a value in its last steps."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.pipeline.transport.messages import Deliver

    torch.manual_seed(0)
    chain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    for stage, part in enumerate(chain):
        smp.set_partition(part, stage)
    model = smp.DistributedModel(chain)

    @smp.step
    def train(x):
        loss = model(x).square().sum()
        model.backward(loss)
        return loss

    losses = [float(train(torch.ones(4, 4)).reduce_mean()) for _ in range(steps - counted)]
    values, asked = model.pipeline.server._context.values, []
    send = values._send

    def counting(stage, message, tensors):
        if isinstance(message, Deliver):
            asked.append(message)
        send(stage, message, tensors)

    values._send = counting
    losses += [float(train(torch.ones(4, 4)).reduce_mean()) for _ in range(counted)]
    return asked, losses


def test_calls_that_wait_get_values_unasked_too(ranks):
    settings = {"partitions": 3, "auto_partition": False, "default_partition": 0, "microbatches": 2}
    waiting = ranks(_asked, 3, 6, 2, config={**settings, "fast_mode": False}, timeout=120)
    assert [asked for asked, _ in waiting] == [[], [], []]
    predicting = ranks(_asked, 3, 6, 2, config=settings, timeout=120)
    assert [losses for _, losses in waiting] == [losses for _, losses in predicting]
