"""The tensors and submodules that a module holds, looked at before every replay of its capture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from operator import is_, methodcaller
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import Buffer, is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = {Tensor, nn.Parameter, Buffer}

# A scripted module has something else in the place of its dictionaries.
_OF_DICTIONARIES = (iter, dict.values)
_OF_OTHERS = (methodcaller("keys"), methodcaller("values"))


class Held:
    """What a recording of `module` reads beside its arguments, found without walking its tree.

    `module.parameters()` calls Python for every submodule: that took 0.4 ms a call for 24 layers,
    half of a decode step. Here the dictionaries that hold them are kept, and read by C code.

    Attributes:
        version: another number as soon as a submodule or a hook is another, a tensor has another
            name, or its shape, strides or dtype are: what was recorded is of another module then.
    """

    def __init__(self, module: nn.Module) -> None:
        self.version = 0
        self._module = module
        self._code: list[Any] = []
        self._tensors: list[Any] = []
        self._empty: list[Any] = []
        self._all: list[Any] = []
        self._names: list[Any] = []
        self._called: list[Any] = []
        self._keys_of: Callable[[Any], Any] = iter
        self._values_of: Callable[[Any], Any] = dict.values
        self._layouts: tuple[list[Any], ...] = ()
        self._walk()
        self.tensors()

    def tensors(self) -> list[Tensor]:
        """Its parameters and buffers as they are now, those that are shared more than once.

        A tensor that wraps others, and has no memory of its own, stands behind these.
        """
        changed = (
            any(self._empty)
            or _each(self._keys_of, self._all) != self._names
            # Not by ==: whether two modules are equal may be theirs to say.
            or not all(map(is_, _each(self._values_of, self._code), self._called))
        )
        if changed:
            self._walk()
        values = _each(self._values_of, self._tensors)
        tensors: list[Tensor] = [tensor for tensor in values if tensor is not None]
        if not set(map(type, tensors)) <= _PLAIN:
            tensors = [part for tensor in tensors for part in _parts(tensor)]
        # Lists of one thing each are made in half the time that one of tuples takes.
        dtypes = [tensor.dtype for tensor in tensors]
        layouts = (
            [tensor is None for tensor in values],
            [tensor.shape for tensor in tensors],
            [*map(Tensor.stride, tensors)],
            dtypes,
            # The conjugate lies at the same address.
            [*map(Tensor.is_conj, tensors)] if any(t.is_complex for t in set(dtypes)) else [],
        )
        if changed or layouts != self._layouts:
            self.version += 1
            self._layouts = layouts
        return tensors

    def _walk(self) -> None:
        modules = list(self._module.modules())
        code: list[Any] = [module._modules for module in modules]
        code += [m._forward_pre_hooks for m in modules]
        code += [m._forward_hooks for m in modules]
        tensors: list[Any] = [m._parameters for m in modules]
        tensors += [m._buffers for m in modules]
        self._code = [held for held in code if held]
        self._tensors = [held for held in tensors if held]
        self._empty = [held for held in (*code, *tensors) if not held]
        self._all = [*self._code, *self._tensors]
        plain = all(isinstance(held, dict) for held in self._all)
        self._keys_of, self._values_of = _OF_DICTIONARIES if plain else _OF_OTHERS
        self._names = _each(self._keys_of, self._all)
        self._called = _each(self._values_of, self._code)


def module_of(fn: Any) -> nn.Module | None:
    """The module that `fn` is, is a method of, or binds; also behind `partial` and compiled."""
    bound: list[Any] = []
    while not isinstance(fn, nn.Module):
        owner = getattr(fn, "__self__", None)
        if isinstance(owner, nn.Module):
            fn = owner
        elif isinstance(fn, partial):
            bound += [*fn.args, *fn.keywords.values()]
            fn = fn.func
        elif hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        else:
            break
    modules = [module for module in (fn, *bound) if isinstance(module, nn.Module)]
    return nn.ModuleList(modules) if len(modules) > 1 else next(iter(modules), None)


def _each(read: Callable[[Any], Any], held: list[Any]) -> list[Any]:
    return list(chain.from_iterable(map(read, held)))


def _parts(tensor: Any) -> list[Tensor]:
    """`tensor` itself, or, behind it, what it wraps; nothing, if it has never been used."""
    if is_lazy(tensor):
        return []
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]
