"""A device without a device: tensors that say they are on `cuda:0`, refuse what CUDA refuses, and count what it costs.

The numbers are in CPU memory and computed by the CPU's kernels, so results must equal the CPU's to the last bit
(fused attention apart: the double always takes the plain kernel). Inside the block

- an operation that mixes device and CPU tensors raises `RuntimeError`, as CUDA does. CUDA allows 0-dim CPU tensors in
  elementwise operations, copies, and CPU indices, and so does this;
- `waits` counts what makes the CPU wait for the device: `.item()`, `bool(tensor)`, `.cpu()`, `nonzero`, masks as
  indices, and others whose shape depends on values;
- `copies` counts copies from the host with their bytes.

With `floats=32` it refuses float64, as Apple's MPS does.

Limits. `torch.Generator(device="cuda")` and streams need a driver; the global generator of the double is the CPU's.
Tensors that were made before the block are on the CPU. The mode belongs to its thread: other threads can compute with
tensors of the double, and make none. For torch itself the tensors are on the meta device (its autograd engine starts
threads for real devices), so C++ code that asks for CUDA, such as autocast and fused optimizers, does not see one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

aten = torch.ops.aten
_WAITS = {
    aten._local_scalar_dense.default: "item",
    aten.nonzero.default: "nonzero",
    aten.equal.default: "equal",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
    aten.unique_consecutive.default: "unique",
    aten.bincount.default: "bincount",
    aten.repeat_interleave.Tensor: "repeat_interleave",
}
_INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
_TAKE_SCALARS = (*_INDEXING, aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.where.self)
_COPIES = (aten._to_copy.default, aten.copy_.default)
_WIDE = (torch.float64, torch.complex128)


class OnDevice(Tensor):
    """A tensor of the double; `host` has its numbers."""

    host: Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, host: Tensor, place: torch.device) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device="meta",
        )
        made.host, made.place = host, place
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.place.type == "cuda"

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"{self.host!r} on {self.place}"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {}, None)


class DeviceDouble(TorchDispatchMode):
    """Inside the block, `device` exists; the counts are those of the block."""

    def __init__(self, kind: str = "cuda", floats: int = 64) -> None:
        super().__init__()
        self.device = torch.device(kind, 0)
        self.floats = floats
        self.waits: Counter[str] = Counter()
        self.copies: list[int] = []

    def __enter__(self) -> DeviceDouble:
        self._patches = ExitStack()
        self._patches.enter_context(_driver(self.device))
        super().__enter__()
        return self

    def __exit__(self, *fault: Any) -> None:
        super().__exit__(*fault)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {}, self)

    def put(self, tensor: Tensor) -> OnDevice:
        """A copy on the device, not counted."""
        return OnDevice(tensor.detach().clone(), self.device)


def _compute(func: Any, args: Any, kwargs: dict[str, Any], double: DeviceDouble | None) -> Any:
    """Run `func` on the numbers behind the tensors; the result is on the device if its inputs are."""
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    ours = [each for each in tensors if isinstance(each, OnDevice)]
    wanted = kwargs.get("device")
    place = _place(wanted, ours, double)
    if not ours and place is None:
        return func(*args, **kwargs)
    if ours:
        _refuse_mixing(func, args, tensors)
    if func is aten._fused_sdp_choice.default:
        return 0  # the plain kernel: the fused ones are the CPU's or the GPU's own
    if double is not None:
        _count(func, args, ours, place, double)
    unwrapped, named = tree_map_only(OnDevice, lambda each: each.host, (args, kwargs))
    if wanted is not None:
        named["device"] = torch.device("cpu")
    if func is aten.resize_.default or func is aten.set_.source_Tensor:
        raise NotImplementedError(f"the device double does not know {func}")
    result = func(*unwrapped, **named)
    known = {id(each.host): each for each in ours}

    def wrapped(each: Tensor) -> Tensor:
        if id(each) in known:
            return known[id(each)]  # an operation in place
        if isinstance(each, OnDevice) or place is None:
            return each
        if double is not None and double.floats < 64 and each.dtype in _WIDE:
            raise TypeError(f"{place} has no {each.dtype} ({func})")
        return OnDevice(each, place)

    return tree_map_only(Tensor, wrapped, result)


def _place(wanted: torch.device | None, ours: list[OnDevice], double: DeviceDouble | None) -> torch.device | None:
    """Where the result is; None for the CPU. A wanted meta device is how torch calls the double's."""
    if wanted is None:
        return ours[0].place if ours else None
    wanted = torch.device(wanted)
    if double is not None and wanted.type in ("meta", double.device.type):
        return double.device
    if ours and wanted.type in ("meta", ours[0].place.type):
        return ours[0].place
    return None


def _refuse_mixing(func: Any, args: Any, tensors: list[Tensor]) -> None:
    there = [each for each in tensors if not isinstance(each, OnDevice)]
    if not there or func in _COPIES:
        return
    if func in _INDEXING:  # indices may be on the CPU; the values, if any, only as a scalar
        there = [each for each in (args[0], *args[2:3]) if isinstance(each, Tensor) and not isinstance(each, OnDevice)]
    scalars = torch.Tag.pointwise in func.tags or func in _TAKE_SCALARS
    in_place = isinstance(args[0], Tensor) and not isinstance(args[0], OnDevice) and func._schema.is_mutable
    if any(each.dim() or not scalars for each in there) or in_place:
        shapes = [f"{tuple(each.shape)} on {each.device}" for each in tensors]
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {', '.join(shapes)}")


def _count(func: Any, args: Any, ours: list[OnDevice], place: torch.device | None, double: DeviceDouble) -> None:
    if func in _WAITS and ours:
        double.waits[_WAITS[func]] += 1
    elif func in _INDEXING and ours:
        indices = [each for each in args[1] if each is not None]
        double.waits["mask"] += any(each.dtype in (torch.bool, torch.uint8) for each in indices)
        double.copies += [each.nbytes for each in indices if not isinstance(each, OnDevice)]
    elif func is aten._to_copy.default:
        if ours and place is None:
            double.waits["cpu"] += 1
        elif not ours and place is not None:
            double.copies.append(args[0].nbytes)
    elif func is aten.copy_.default and ours:
        if not isinstance(args[0], OnDevice):
            double.waits["cpu"] += 1
        elif not isinstance(args[1], OnDevice):
            double.copies.append(args[1].nbytes)


@contextmanager
def _driver(device: torch.device) -> Iterator[None]:
    """What torch asks the driver for, answered by the CPU; `torch.tensor(..., device=)` copies where we see it."""
    calls = {
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "synchronize": lambda *_: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "get_device_name": lambda *_: "device double",
        "is_bf16_supported": lambda **_: True,
    }
    before = torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        if device.type in ("cuda", "xpu"):
            for name, answer in calls.items():
                stack.enter_context(patch.object(torch.get_device_module(device), name, answer))
            stack.enter_context(patch.object(Tensor, "pin_memory", lambda tensor, *_: tensor.clone()))
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield
        finally:
            torch._C._set_only_lift_cpu_tensors(before)
