"""A stream that reaches only some of a GPU's multiprocessors, and how many it really reaches.

PyTorch's green contexts come in groups of 8 multiprocessors on Hopper. The driver can split finer,
in pairs, if kernels need no large clusters, so it is asked directly.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import triton
import triton.language as tl

from hexiseq_triton.errors import ConfigError

_SM_RESOURCE = 1
_IGNORE_COSCHEDULING = 1
_DEFAULT_STREAM = 1
_NON_BLOCKING = 1
_RESOURCE_BYTES = 1024
"""Room for one of the driver's resource descriptions, whose size differs between its versions."""


def confined_stream(num_sms: int, device: torch.device) -> tuple[torch.cuda.Stream, int]:
    """Return a stream on `num_sms` multiprocessors, and the number it reaches.

    The green context lives as long as the process.

    Raises:
        ConfigError: if the driver cannot make it.
    """
    torch.cuda.synchronize(device)  # makes the primary context
    stream = torch.cuda.ExternalStream(_green_stream(num_sms, device.index), device)
    return stream, reached_sms(stream, device)


def _green_stream(num_sms: int, ordinal: int) -> int:
    """Return the driver's handle of a stream in a new green context."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        function = getattr(driver, name, None)
        code = -1 if function is None else function(*arguments)
        if code:
            raise ConfigError(
                f"--emulate-sms {num_sms}: the driver's {name} "
                + ("is missing" if function is None else f"failed with error {code}")
                + "; green contexts need a driver for CUDA 12.5 or newer, and an even number of "
                "multiprocessors"
            )

    device = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), ordinal)
    whole, part = (ctypes.create_string_buffer(_RESOURCE_BYTES) for _ in range(2))
    call("cuDeviceGetDevResource", device, whole, _SM_RESOURCE)
    groups = ctypes.c_uint(1)
    call(
        "cuDevSmResourceSplitByCount",
        part,
        ctypes.byref(groups),
        whole,
        None,
        ctypes.c_uint(_IGNORE_COSCHEDULING),
        ctypes.c_uint(num_sms),
    )
    description, context, stream = (ctypes.c_void_p() for _ in range(3))
    call("cuDevResourceGenerateDesc", ctypes.byref(description), part, ctypes.c_uint(1))
    call("cuGreenCtxCreate", ctypes.byref(context), description, device, _DEFAULT_STREAM)
    call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, _NON_BLOCKING, 0)
    assert stream.value is not None
    return stream.value


def reached_sms(stream: torch.cuda.Stream, device: torch.device) -> int:
    """Return how many multiprocessors kernels on `stream` run on, by asking a kernel's programs."""
    programs = 64 * int(torch.cuda.get_device_properties(device).multi_processor_count)
    found = torch.full((programs,), -1, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        _where_kernel[(programs,)](found)
    torch.cuda.synchronize(device)
    return len(set(found.tolist()))


@triton.jit
def _where_kernel(found):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    sm = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r,r", [program], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(found + program, sm)
