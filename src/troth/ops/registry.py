"""The one door to anything with more than one implementation.

An op *is* its reference: a plain PyTorch function that accumulates in float32. With it an op declares how close others
must come, and the grid of calls on which they are tested and timed. Providers are other implementations with the same
signature; each says on which machines it is available and which arguments it supports. The order of providers is one
list, fixed at start-up by ``activate`` and shown by ``troth doctor``. A call goes to the first active provider that
supports it, else to the reference, and that is counted: ``fallbacks()`` feeds the engine's list of downgrades.

Next: ``ops/attention.py`` for what an op file looks like, ``ops/impl/`` for the providers.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from troth.contracts.counted import counted
from troth.errors import OptionError
from troth.ops.grid import Case

P = ParamSpec("P")
R = TypeVar("R")

REFERENCE: Final = "reference"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest accepted difference from the reference: |a - b| <= absolute + relative * |b|, per dtype of the output."""

    absolute: float
    relative: float
    reason: str

    def holds(self, got: Tensor, want: Tensor) -> Tensor:
        """bool, shaped as ``want``, the reference's result: where ``got`` is close enough. NaN is close to nothing."""
        want = want.double()
        return (got.double() - want).abs() <= self.absolute + self.relative * want.abs()


@dataclass(frozen=True, slots=True)
class ProviderOp:
    """One provider's implementation of one op."""

    provider: str
    run: Callable[..., Any]
    supports: Callable[..., bool]


Grid = Callable[[], Iterable[Case]]


class Op(Generic[P, R]):
    """An operation: its reference, its providers in order, how close they must come, and on which calls."""

    def __init__(self, reference: Callable[P, R], tolerances: Mapping[torch.dtype, Tolerance], grid: Grid) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.tolerances = dict(tolerances)
        """By dtype of the result."""
        self.grid = grid
        self.implementations: dict[str, ProviderOp] = {}
        self.num_fallbacks = 0
        """Calls that no active provider took."""
        self._active: tuple[ProviderOp, ...] = ()
        self.__doc__ = reference.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the first active provider that supports these arguments, else the reference."""
        for implementation in self._active:
            if implementation.supports(*args, **kwargs):
                return implementation.run(*args, **kwargs)
        if self._active:
            self.num_fallbacks += 1
        return self.reference(*args, **kwargs)

    def provider(
        self, name: str, *, supports: Callable[..., bool] | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register an implementation. Its signature must equal the reference's.

        ``supports`` gets the call's arguments; it looks at shapes, dtypes and devices only and must cost under a
        microsecond. None: everything.
        """

        def register(run: Callable[P, R]) -> Callable[P, R]:
            ours, theirs = inspect.signature(self.reference), inspect.signature(run)
            if list(ours.parameters.values()) != list(theirs.parameters.values()):
                raise TypeError(f"{self.name}: provider {name} takes {theirs}, the reference {ours}")
            if name in self.implementations or name == REFERENCE:
                raise TypeError(f"{self.name}: provider {name} is registered already")
            self.implementations[name] = ProviderOp(name, run, supports or (lambda *args, **kwargs: True))
            return run

        return register

    def activate(self, order: tuple[str, ...]) -> None:
        """Use these providers, in this order."""
        self._active = tuple(self.implementations[name] for name in order if name in self.implementations)

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the providers in use for this op, in order."""
        return tuple(implementation.provider for implementation in self._active)


OPS: Final[dict[str, Op[Any, Any]]] = {}


def op(*, tolerances: Mapping[torch.dtype, Tolerance], grid: Grid) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make a reference function the op of its name.

    Args:
        tolerances: of its result, by dtype.
        grid: gives the calls it is tested and timed on; names of cases are unique.
    """

    def declare(reference: Callable[P, R]) -> Op[P, R]:
        declared = Op(reference, tolerances, grid)
        if declared.name in OPS:
            raise TypeError(f"op {declared.name} is declared twice")
        OPS[declared.name] = declared
        return declared

    return declare


@dataclass(frozen=True, slots=True)
class Provider:
    """A set of implementations that come and go together."""

    name: str
    modules: tuple[str, ...]
    """Modules under ``troth.ops.impl`` whose import registers the implementations."""
    unavailable: Callable[[], str | None]
    """None when this machine can run it, else why not and what to do about it."""
    about: Callable[[], str] = lambda: "active"
    """What to say of it where it is in use."""
    is_broken: Callable[[], bool] = lambda: False
    """Whether it is installed in a way that cannot work: more than absent."""
    by_default: bool = True
    """Whether it is used where nobody named providers."""


def _torch_unavailable() -> str | None:
    return None


def _cpu_unavailable() -> str | None:
    from troth.ops.impl import cpu

    return cpu.unavailable()


def _cpu_about() -> str:
    from troth.ops.impl import cpu

    return cpu.about()


def _cpu_is_broken() -> bool:
    from troth.ops.impl import cpu

    return cpu.is_broken()


def _triton_unavailable() -> str | None:
    from troth.ops.impl import triton

    return triton.unavailable()


PROVIDERS: Final[tuple[Provider, ...]] = (
    Provider(
        "cpu",
        ("cpu_attention", "cpu_experts", "cpu_linear", "cpu_norm", "cpu_recurrent", "cpu_sample"),
        _cpu_unavailable,
        _cpu_about,
        _cpu_is_broken,
    ),
    Provider("invariant", ("triton_invariant",), _triton_unavailable, by_default=False),
    Provider(
        "triton",
        (
            "triton_attention",
            "triton_copy_blocks",
            "triton_embedding",
            "triton_gated_activation",
            "triton_gated_delta",
            "triton_linear",
            "triton_norm",
            "triton_rotary",
            "triton_sample",
            "triton_short_conv",
            "triton_sigmoid_gate",
        ),
        _triton_unavailable,
    ),
    Provider(
        "torch",
        (
            "torch_attention",
            "torch_experts",
            "torch_gated_delta",
            "torch_linear",
            "torch_mask",
            "torch_multiply",
            "torch_norm",
            "torch_rotary",
            "torch_short_conv",
            "torch_sigmoid_gate",
        ),
        _torch_unavailable,
    ),
)
"""Every provider. Those of the default order come fastest first."""


@dataclass(frozen=True, slots=True)
class ProviderStatus:
    """A line of ``troth doctor``."""

    name: str
    active: bool
    reason: str
    ops: tuple[str, ...]
    is_broken: bool = False


def default_order() -> tuple[str, ...]:
    """Names of the providers that are used where nobody names any: what can run here, fastest first."""
    return tuple(provider.name for provider in PROVIDERS if provider.by_default and provider.unavailable() is None)


def activate(order: tuple[str, ...] | None = None) -> tuple[ProviderStatus, ...]:
    """Fix the order of providers for this process.

    Args:
        order: provider names, first choice first; None: the default order. ``reference`` may stand alone to run nothing
            but references.

    Raises:
        OptionError: a provider asked for by name is unknown or cannot run here.
    """
    known = {provider.name: provider for provider in PROVIDERS}
    problems = {provider.name: provider.unavailable() for provider in PROVIDERS}
    names = default_order() if order is None else order
    for name in names:
        if name == REFERENCE:
            continue
        if name not in known:
            raise OptionError(f"unknown op provider {name!r}; known: {', '.join([*known, REFERENCE])}")
        if problems[name] is not None:
            raise OptionError(f"op provider {name!r} cannot run here: {problems[name]}")
    for name in names:
        if name != REFERENCE:
            for module in known[name].modules:
                importlib.import_module(f"troth.ops.impl.{module}")
    for declared in OPS.values():
        declared.activate(tuple(name for name in names if name != REFERENCE))
    return tuple(
        ProviderStatus(
            name,
            name in names,
            problems[name] or (provider.about() if name in names else "not asked for"),
            tuple(sorted(o.name for o in OPS.values() if name in o.active)),
            provider.is_broken(),
        )
        for name, provider in known.items()
    )


def fallbacks() -> tuple[str, ...]:
    """Every op that ran its reference although providers are active, in words."""
    return tuple(
        f"{declared.name} ran its reference {counted(declared.num_fallbacks, 'time')}: "
        f"none of {', '.join(declared.active) or 'its providers'} takes such arguments"
        for declared in OPS.values()
        if declared.num_fallbacks
    )
