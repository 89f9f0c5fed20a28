"""The data of a rehearsed script: the number of batches of its loader, and batches of given shapes if its data are elsewhere.

Data sets of a cluster are rarely on a laptop. With given shapes, every ``DataLoader`` of PyTorch returns batches of these shapes
and reads nothing. A ``Dataset`` with missing files counts as one with a given number of samples. The script needs no change.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data as torch_data

if TYPE_CHECKING:
    from smp_records.rehearsal import InputShape

#: Methods of a data set that may look for files.
_LENGTH, _MAKING = "__len__", "__init__"

#: What classes are made by.
_SUBCLASSING = "__init_subclass__"

#: On a data set without files.
_MARK = "_smp_stands_in"


class Loaders:
    """A counter of the batches of a script's loaders, from :meth:`start` to :meth:`stop`.

    Args:
        inputs: the shapes of batches to make; if empty, batches are read as in a job.
        samples: number of samples of a data set with missing files.

    Attributes:
        epoch_batches: batches of an epoch of the loader that was read last; None if the loader has no length.
        batches: that the script has read since the attribute was set to 0.
    """

    def __init__(self, inputs: Sequence[InputShape], samples: int) -> None:
        self._inputs = list(inputs)
        self._samples = samples
        self._put_back: list[Callable[[], object]] = []
        self.epoch_batches: int | None = None
        self.batches = 0

    def start(self) -> None:
        """Follow every loader that is read from now on, and data sets with classes that are defined from now on."""
        loader = torch_data.DataLoader
        read = loader.__iter__
        follow = self

        def followed(self: Any) -> Iterator[Any]:
            source = follow.stand_ins(self) if follow._inputs else read(self)
            return _Followed(source, self, follow)

        loader.__iter__ = followed  # type: ignore[assignment, method-assign]
        self._put_back.append(lambda: setattr(loader, "__iter__", read))
        if self._inputs:
            made = torch_data.Dataset.__dict__.get(_SUBCLASSING)
            setattr(torch_data.Dataset, _SUBCLASSING, classmethod(lambda kind: self._stand_in_for(kind)))
            self._put_back.append(lambda: _restore(made))

    def stop(self) -> None:
        """Stop following loaders and data sets."""
        while self._put_back:
            self._put_back.pop()()

    def stand_ins(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of an epoch."""
        size = getattr(loader, "batch_size", None)
        # A loader that was made with a batch sampler has no size of its own.
        if not size:
            size = getattr(loader.batch_sampler, "batch_size", None) or 1
        batches = _length(loader)
        numbers: Iterable[int] = itertools.count() if batches is None else range(batches)
        for _ in numbers:
            yield self.batch(size)

    def batch(self, size: int) -> Any:
        """Return one batch: a dictionary of named tensors, or a list of numbered ones.

        Args:
            size: replaces a size of -1.
        """
        made = {one.name: _tensor(one, size) for one in self._inputs}
        if all(name.isdecimal() for name in made):
            return [made[name] for name in sorted(made, key=int)]
        return made

    def _stand_in_for(self, kind: type) -> None:
        """Let a class of data sets do without its files."""
        making, length = kind.__dict__.get(_MAKING), kind.__dict__.get(_LENGTH)
        samples = self._samples
        if making is not None:

            @functools.wraps(making)
            def without_files(self: Any, *args: Any, **kwargs: Any) -> None:
                try:
                    making(self, *args, **kwargs)
                except OSError:
                    setattr(self, _MARK, True)

            setattr(kind, _MAKING, without_files)
        if length is not None:

            @functools.wraps(length)
            def counted(self: Any) -> int:
                is_stand_in = getattr(self, _MARK, False)
                own = 0 if is_stand_in else int(length(self))
                return own or samples

            setattr(kind, _LENGTH, counted)


class _Followed:
    """Batches of a loader, counted."""

    def __init__(self, source: Iterator[Any], loader: Any, loaders: Loaders) -> None:
        self._source = source
        self._loader = loader
        self._loaders = loaders

    def __iter__(self) -> _Followed:
        return self

    def __next__(self) -> Any:
        batch = next(self._source)
        self._loaders.batches += 1
        self._loaders.epoch_batches = _length(self._loader)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def _length(loader: Any) -> int | None:
    """Return the number of batches of an epoch, or None for a stream, which does not know it."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _tensor(given: InputShape, size: int) -> torch.Tensor:
    """Return ones for a floating-point type, and zeros for an integer type: any vocabulary has index 0."""
    shape = [size if axis == -1 else axis for axis in given.shape]
    dtype: torch.dtype = getattr(torch, given.dtype)
    return torch.ones(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


def _restore(made: Any) -> None:
    if made is None:
        delattr(torch_data.Dataset, _SUBCLASSING)
    else:
        setattr(torch_data.Dataset, _SUBCLASSING, made)
