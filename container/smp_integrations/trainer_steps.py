"""Training and prediction steps of Transformers' ``Trainer``: its own loss, computed for each microbatch of a step."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.generation.whole_call import call_whole
from smp_runtime.job import session as sessions
from smp_runtime.step.microbatches import StepOutput, mark_count
from smp_runtime.step.step import step
from smp_runtime.tensors.nested import map_leaves

if TYPE_CHECKING:
    from smp_runtime.model.distributed_model import DistributedModel


@dataclass(frozen=True)
class ShortBatch:
    """A batch with a number of samples that the number of microbatches does not divide, such as the last one of an epoch.

    Microbatches then differ by one sample. If there are fewer samples than microbatches, some microbatches get a sample
    for a second time, with weight 0.

    Attributes:
        inputs: of the model, by name.
        samples: in the batch.
        by_samples: whether the loss of a microbatch is a mean over its samples, and is weighted by their number.
        parts: number of consecutive parts of each tensor; each part has all samples.
    """

    inputs: Mapping[str, Any]
    samples: int
    by_samples: bool
    parts: int = 1

    def sizes(self, count: int) -> list[int]:
        """Return the number of samples of each microbatch that count."""
        least, more = divmod(self.samples, count)
        return [least + (index < more) for index in range(count)]

    def smp_slice(self, count: int, index: int, axis: int) -> tuple[dict[str, Any], float]:
        """Return the inputs of a microbatch, and the factor of its loss before microbatches are averaged."""
        sizes = self.sizes(count)
        start, size = (sum(sizes[:index]), sizes[index]) if sizes[index] else (0, 1)

        def cut(value: Any) -> Any:
            has_rows = isinstance(value, torch.Tensor) and value.dim() > 0
            rows = value.shape[0] if has_rows else 0
            if rows == self.samples:
                return value.narrow(0, start, size)
            if rows == self.parts * self.samples:
                # Each sample has several rows, part after part.
                by_part = value.unflatten(0, (self.parts, self.samples))
                return by_part.narrow(1, start, size).flatten(0, 1)
            return value

        weight = count * sizes[index] / self.samples if self.by_samples else float(sizes[index] > 0)
        return {name: cut(value) for name, value in self.inputs.items()}, weight


def samples_of(inputs: Mapping[str, Any]) -> int:
    """Return the number of samples of a batch: the size of its first tensor, or 0 without one."""
    sizes = (value.shape[0] for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim() > 0)
    return next(sizes, 0)


def _batch(trainer: Any, inputs: Mapping[str, Any], microbatches: int, by_samples: bool) -> Any:
    own = getattr(trainer, "smp_batch", None)
    if own is not None:
        return own(inputs, by_samples)
    samples = samples_of(inputs)
    return ShortBatch(inputs, samples, by_samples) if samples % microbatches else (inputs, 1.0)


def _loss(trainer: Any, model: DistributedModel, inputs: Mapping[str, Any], items: Any, **more: Any) -> Any:
    """Return the loss that the trainer or its subclass computes for a microbatch."""
    if accepts_argument(trainer.compute_loss, "num_items_in_batch"):
        more["num_items_in_batch"] = items
    with trainer.compute_loss_context_manager():
        return trainer.compute_loss(model, dict(inputs), **more)


def accepts_argument(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function accepts an argument of that name, or any keyword arguments."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


# -- label smoothing -------------------------------------------------------------------------------------------------


class _OverTheBatch:
    """A label smoother that averages over the tokens of the whole batch.

    The wrapped smoother averages over the tokens of its call, as in Transformers 4.

    Args:
        tokens: average number of tokens of a microbatch that count, with all labels and without the first of each sample.
    """

    def __init__(self, smoother: Any, tokens: list[float]) -> None:
        self._smoother = smoother
        self._tokens = tokens

    def __call__(self, outputs: Any, labels: torch.Tensor, shift_labels: bool = False) -> torch.Tensor:
        counted = int(_counted(labels, self._smoother.ignore_index)[int(shift_labels)])
        if not counted:
            logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
            return logits.float().sum() * 0.0
        loss: torch.Tensor = self._smoother(outputs, labels, shift_labels=shift_labels)
        return loss * (counted / self._tokens[int(shift_labels)])


def _counted(labels: torch.Tensor, ignored: int) -> torch.Tensor:
    counts = labels != ignored
    return torch.stack((counts.sum(), counts[..., 1:].sum()))


@contextlib.contextmanager
def _smoothing(trainer: Any, inputs: Mapping[str, Any], microbatches: int) -> Iterator[bool]:
    """Average smoothed losses of microbatches and replicas as for one batch, inside the block, in all releases.

    Yields:
        Whether the smoothing is done here. If so, the loss takes no number of tokens, because the trainer would multiply
        it by the number of processes.
    """
    smoother: Any = getattr(trainer, "label_smoother", None)
    labels = inputs.get("labels")
    is_own = (
        smoother is not None
        and not accepts_argument(smoother, "num_items_in_batch")
        and trainer.compute_loss_func is None
    )
    if not (is_own and isinstance(labels, torch.Tensor)):
        yield False
        return
    tokens = _counted(labels, smoother.ignore_index).float()
    if trainer.args.average_tokens_across_devices:
        tokens = trainer.accelerator.gather(tokens.unsqueeze(0)).mean(0)
    trainer.label_smoother = _OverTheBatch(smoother, (tokens / microbatches).tolist())
    try:
        yield True
    finally:
        trainer.label_smoother = smoother


# -- training --------------------------------------------------------------------------------------------------------


@step
def forward_backward(trainer: Any, model: DistributedModel, batch: Any, items: Any, scale: float) -> torch.Tensor:
    """Compute the gradients of one microbatch, and return its loss."""
    inputs, weight = batch
    loss: torch.Tensor = _loss(trainer, model, inputs, items) * (weight * scale)
    model.backward(loss)
    return loss.detach()


def training_step(trainer: Any, model: DistributedModel, inputs: Mapping[str, Any], items: Any = None) -> torch.Tensor:
    """Run ``Trainer.training_step`` with the batch in microbatches.

    Args:
        items: number of tokens in all batches of this update, over which the loss is a mean; None if each batch has a mean
            of its own.
    """
    model.train()
    switch = getattr(trainer.optimizer, "train", None)
    if callable(switch):
        switch()
    inputs = trainer._prepare_inputs(inputs)
    microbatches = sessions.current_session().ranks.cfg.microbatches
    told = getattr(trainer, "loss_is_scaled_for_ga", None)
    of_all = (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None
    is_scaled = of_all if told is None else told
    scale = 1.0 if is_scaled else 1.0 / trainer.current_gradient_accumulation_steps
    with _smoothing(trainer, inputs, microbatches) as smooths:
        batch = _batch(trainer, inputs, microbatches, by_samples=not (is_scaled or smooths))
        of_all = bool(getattr(trainer.args, "average_tokens_across_devices", False))
        of_each = None if smooths else mark_count(_per_microbatch(items, microbatches), of_all=of_all)
        loss = forward_backward(trainer, model, batch, of_each, scale)
    return loss.reduce_mean().detach().to(trainer.args.device)


def _per_microbatch(items: Any, microbatches: int) -> Any:
    """Return the number of tokens for the mean of one microbatch.

    Losses of microbatches are averaged; with this number, the average is the mean over all tokens.
    """
    if items is None or microbatches == 1:
        return items
    return items / microbatches


# -- prediction ------------------------------------------------------------------------------------------------------


@step
def forward_only(
    trainer: Any, model: DistributedModel, batch: Any, items: Any, has_loss: bool, left_out: Any
) -> tuple[torch.Tensor | None, Any]:
    """Return the loss and outputs of one microbatch.

    Args:
        left_out: names of outputs to leave out; None leaves out all of them.
    """
    inputs, weight = batch
    loss: torch.Tensor | None = None
    if has_loss and left_out is None:
        return _loss(trainer, model, inputs, items).detach().mean() * weight, ()
    if has_loss:
        loss, outputs = _loss(trainer, model, inputs, items, return_outputs=True)
        loss = loss.detach().mean() * weight
        rest = [*(left_out or ()), "loss"]
    else:
        with trainer.compute_loss_context_manager():
            outputs = model(**inputs)
        rest = list(left_out or ())
    if left_out is None:
        return loss, ()
    if isinstance(outputs, Mapping):
        return loss, tuple(value for name, value in outputs.items() if name not in rest)
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    return loss, tuple(outputs[1:] if has_loss else outputs)


def prediction_step(
    trainer: Any,
    model: DistributedModel,
    inputs: Mapping[str, Any],
    prediction_loss_only: bool,
    ignore_keys: list[str] | None = None,
    has_loss: bool | None = None,
) -> tuple[Any, Any, Any]:
    """Run ``Trainer.prediction_step`` with the batch in microbatches.

    Args:
        has_loss: whether the trainer computes a loss of these inputs; None to decide as Transformers does.

    Returns:
        Loss, outputs and labels; None for those that do not exist.
    """
    names = trainer.label_names
    has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
    if has_loss is None:
        has_loss = has_labels or (not names and _returns_loss(trainer, inputs))
    inputs = trainer._prepare_inputs(inputs)
    if ignore_keys is None:
        ignore_keys = _ignored_keys(trainer)
    labels = None
    if has_labels or (has_loss and not names):
        labels = _detached(tuple(inputs.get(name) for name in names))
        if len(labels) == 1:
            labels = labels[0]
    microbatches = sessions.current_session().ranks.cfg.microbatches
    items = _items_of(trainer, inputs) if has_loss else None
    is_scaled = False
    if items is not None:
        is_scaled = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    with torch.no_grad(), _smoothing(trainer, inputs, microbatches) as smooths:
        batch = _batch(trainer, inputs, microbatches, by_samples=not (is_scaled or smooths))
        loss, outputs = forward_only(
            trainer,
            model,
            batch,
            None if smooths else _per_microbatch(items, microbatches),
            has_loss,
            None if prediction_loss_only else ignore_keys,
        )
    mean = loss.reduce_mean().to(trainer.args.device) if has_loss else None
    if prediction_loss_only:
        return mean, None, None
    sizes, parts = None, 1
    if isinstance(batch, ShortBatch):
        sizes, parts = batch.sizes(microbatches), batch.parts
    joined = tuple(_joined(value, sizes, parts) for value in outputs)
    return mean, joined[0] if len(joined) == 1 else joined, labels


def _returns_loss(trainer: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether a model without labels computes a loss of these inputs, as Transformers decides it."""
    given = inputs.get("return_loss")
    return bool(trainer.can_return_loss if given is None else given)


def _ignored_keys(trainer: Any) -> list[str]:
    """Return the outputs that predictions leave out, as the model's configuration names them."""
    config = getattr(trainer.model, "config", None)
    if not config:
        return []
    return list(getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]))


def whole_batch(trainer: Any, model: DistributedModel) -> Callable[..., dict[str, Any]]:
    """Return a function that calls the model outside of steps, with whole batches.

    The function returns the loss, and the logits if label smoothing needs them.
    """
    wanted = ("loss", "logits") if trainer.label_smoother is not None else ("loss",)

    def forward(**inputs: Any) -> dict[str, Any]:
        outputs = model(**inputs)
        return {name: outputs[name] for name in wanted if name in outputs}

    return lambda **inputs: call_whole(model, sessions.current_session().ranks, "prediction", forward, (), inputs)


def _items_of(trainer: Any, inputs: Mapping[str, Any]) -> Any:
    """Return the number of tokens over which the loss of a batch is a mean, or None in releases that do not count them."""
    own = getattr(trainer, "smp_items", None)
    if own is not None:
        return own(inputs)
    count = getattr(trainer, "_get_num_items_in_batch", None)
    return None if count is None else count([inputs], trainer.args.device)


def _joined(value: Any, sizes: list[int] | None, parts: int) -> Any:
    """Join outputs of microbatches along the batch axis, without samples that were there a second time."""
    if isinstance(value, StepOutput):
        return _joined_tensor(value.outputs, sizes, parts)
    if isinstance(value, Mapping):
        joined = {name: _joined(part, sizes, parts) for name, part in value.items()}
        # Of the same type: Transformers' outputs are read as attributes too.
        return type(value)(joined)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        return type(value)([_joined(part, sizes, parts) for part in value])
    return value


def _joined_tensor(outputs: list[torch.Tensor], sizes: list[int] | None, parts: int) -> torch.Tensor:
    kept = []
    for index, output in enumerate(outputs):
        # A microbatch of size 0 has samples that are in another one too.
        if sizes is None or sizes[index]:
            kept.append(output.detach())
    if parts == 1 or kept[0].dim() == 0:
        return StepOutput(kept).concat()
    # Each microbatch has a chunk of every part, such as the chosen and the rejected halves of pairs.
    chunks = [output.chunk(parts) for output in kept]
    whole_parts = list(map(torch.cat, zip(*chunks, strict=True)))
    return torch.cat(whole_parts)


def _detached(value: Any) -> Any:
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value)
