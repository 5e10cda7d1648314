"""The compile boundary. This is the only place that calls torch.compile.

A class declares its entry points with `@supports_torch_compile`; each becomes one whole graph for every number
of tokens and sequences. What was traced is checked: the embedding lookups must be inside.

There are two ways to leave a size open. `Sizes.ANY` makes it unknown to the compiler ("unbacked"): 0 and 1 are
sizes like any other, but fusions that need to know that two sizes agree are lost, which costs a quarter of the
speed on a GPU. `Sizes.MANY` ("backed") lets the compiler reason with the first size that it sees, on the promise
that none below 2 comes: right for the fixed buckets of a captured graph. `Sizes.ONE` leaves nothing open: such an
entry point serves one bucket.
"""

import enum
import inspect
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch._inductor.config as inductor
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed

from toolkit.errors import BoundaryError, MissingDependencyError
from toolkit.toolchain import why_no_compiler

__all__ = [
    "CompileContract",
    "CompiledEntryPoint",
    "Sizes",
    "check_boundary",
    "compile_entry_point",
    "supports_torch_compile",
]

_Module = TypeVar("_Module", bound=type[nn.Module])
_counter = itertools.count()
_LOOKUPS = (torch.nn.functional.embedding, torch.embedding, torch.ops.aten.embedding.default)


class Sizes(enum.Enum):
    """Which sizes a compiled entry point must take without compiling again."""

    ANY = "any"
    MANY = "two or more"
    ONE = "one"


@dataclass(frozen=True, kw_only=True)
class CompileContract:
    """What a class promises about its compile boundary: entry points, and arguments of free first dimension."""

    entry_points: tuple[str, ...]
    dynamic_first_dim: frozenset[str]


def supports_torch_compile(
    *, entry_points: tuple[str, ...], dynamic_first_dim: tuple[str, ...]
) -> Callable[[_Module], _Module]:
    """Class decorator: declare methods that compile as whole graphs, embedding lookups included.

    An entry point takes tensors only and has a fixed signature: an argument that is None in one call and a
    tensor in the next would be ignored by a compiled graph. It must take `ids`.

    Args:
        entry_points: names of methods.
        dynamic_first_dim: names of their arguments whose first dimension varies between calls.

    Raises:
        BoundaryError: a method is missing, has a default or variadic argument, or takes no `ids`; or no entry
            point takes an argument that `dynamic_first_dim` names.
    """

    def decorate(cls: _Module) -> _Module:
        known: set[str] = set()
        for name in entry_points:
            method = getattr(cls, name, None)
            if not inspect.isfunction(method):
                raise BoundaryError(f"{cls.__name__} has no method {name!r} to compile")
            parameters = list(inspect.signature(method).parameters.values())[1:]
            for parameter in parameters:
                plain = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
                if not plain or parameter.default is not inspect.Parameter.empty:
                    raise BoundaryError(
                        f"{cls.__name__}.{name}: argument {parameter.name!r} is optional; write a second entry point"
                    )
            if "ids" not in {parameter.name for parameter in parameters}:
                raise BoundaryError(f"{cls.__name__}.{name} takes no `ids`: the embedding layer is outside of it")
            known.update(parameter.name for parameter in parameters)
        unknown = sorted(set(dynamic_first_dim) - known)
        if unknown:
            raise BoundaryError(f"{cls.__name__}: no entry point takes {unknown[0]!r}, named in dynamic_first_dim")
        contract = CompileContract(entry_points=entry_points, dynamic_first_dim=frozenset(dynamic_first_dim))
        cls.compile_contract = contract  # pyright: ignore[reportAttributeAccessIssue]
        return cls

    return decorate


def check_boundary(graph: fx.Graph, model: nn.Module, entry_point: str) -> None:
    """Check that a traced graph looks up every embedding table of `model`, the token ids' among them.

    Raises:
        BoundaryError: naming what is outside.
    """
    lookups = [node for node in graph.nodes if node.op == "call_function" and node.target in _LOOKUPS]
    indexed_by = {name for node in lookups for name in _sources(_argument(node, 0, "input"))}
    looked_up = {_argument(node, 1, "weight") for node in lookups}
    tables = sum(isinstance(module, nn.Embedding) for module in model.modules())
    where = f"{type(model).__name__}.{entry_point}"
    if not indexed_by & {"ids", "l_ids_"}:  # dynamo calls the placeholder of a local x "l_x_"
        raise BoundaryError(f"{where}: no embedding lookup of `ids` inside the compiled graph")
    if len(looked_up) < tables:
        raise BoundaryError(f"{where}: {len(looked_up)} of {tables} embedding tables are looked up inside the graph")


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs[name]


def _sources(node: Any) -> set[str]:
    """Names of the placeholders that an index is computed from."""
    if not isinstance(node, fx.Node):
        return set()
    if node.op == "placeholder":
        return {node.name}
    return {name for source in node.all_input_nodes for name in _sources(source)}


class CompiledEntryPoint:
    """One entry point of a model, compiled as one whole graph on its first call.

    Attributes:
        graph: what was traced; None before the first call.
        compilations: how often the compiler ran; more than once is a recompile.
    """

    def __init__(self, model: nn.Module, name: str, sizes: Sizes, backend: str) -> None:
        contract: CompileContract = type(model).compile_contract  # pyright: ignore[reportAttributeAccessIssue]
        self.graph: fx.Graph | None = None
        self.compilations = 0
        self._model, self._name, self._backend = model, name, backend
        self._mark = torch._dynamo.decorators.mark_unbacked if sizes is Sizes.ANY else torch._dynamo.mark_dynamic
        open_sizes = sizes is not Sizes.ONE
        method = getattr(type(model), name)
        names = list(inspect.signature(method).parameters)[1:]
        self._dynamic = tuple(k for k, n in enumerate(names) if n in contract.dynamic_first_dim and open_sizes)
        # dynamo keeps one list of compiled variants a code object, with a limit on its length, and remembers by the
        # code's name which sizes it has seen, to make those that change dynamic. A copy of the code under a name of
        # its own keeps models of one class apart, however many a process loads.
        code = method.__code__.replace(co_name=f"{name}_{next(_counter)}")
        own = types.FunctionType(code, method.__globals__, name, method.__defaults__, method.__closure__)
        dynamic = None if open_sizes else False
        bound = types.MethodType(own, model)
        self._compiled = torch.compile(bound, fullgraph=True, dynamic=dynamic, backend=self._compile)

    def _compile(self, module: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        check_boundary(module.graph, self._model, self._name)
        self.graph = module.graph
        self.compilations += 1
        # Padding of matrices whose sizes are no multiples of 8 is decided by the first batch's size, and until torch
        # 2.12 that decision becomes a guard: a smaller batch would compile again.
        with inductor.patch(shape_padding=False):
            return torch._dynamo.lookup_backend(self._backend)(module, example_inputs)

    def __call__(self, *args: Tensor) -> Tensor:
        """Run the compiled graph; the first call compiles.

        Raises:
            BoundaryError: what was traced leaves an embedding table outside.
        """
        for k in self._dynamic:
            self._mark(args[k], 0)
        with torch.inference_mode():
            try:
                return self._compiled(*args)
            except BackendCompilerFailed as error:
                if isinstance(error.inner_exception, BoundaryError):
                    raise error.inner_exception from None
                raise


def compile_entry_point(model: nn.Module, name: str, sizes: Sizes, backend: str = "inductor") -> CompiledEntryPoint:
    """Compile the entry point `name` of a class decorated with `@supports_torch_compile`.

    Args:
        model: an instance.
        name: one of the class's declared entry points.
        sizes: how small a batch may get.
        backend: a dynamo backend; "inductor", or "eager" to trace and check without generating code.

    Raises:
        BoundaryError: the class is not decorated, or has no such entry point; on the first call, if the
            embedding layer is outside the graph.
        MissingDependencyError: the backend needs a compiler that this machine lacks.
    """
    contract = getattr(type(model), "compile_contract", None)
    if contract is None or name not in contract.entry_points:
        raise BoundaryError(f"{type(model).__name__}.{name} is not declared with @supports_torch_compile")
    device = next(model.parameters()).device
    reason = why_no_compiler(device) if backend == "inductor" else None
    if reason is not None:
        raise MissingDependencyError(f"torch.compile cannot run here: {reason}; or use --mode eager")
    return CompiledEntryPoint(model, name, sizes, backend)
