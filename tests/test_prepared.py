"""What a repeated launch skips: checks, hashes of segments, Triton's lookup; nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import kernel_runs
import pytest
import torch
from assertions import assert_as_close_as
from triton.tools.tensor_descriptor import TensorDescriptor

from hexiseq_triton.kernels.forms import form
from hexiseq_triton.kernels.interned import interned
from hexiseq_triton.kernels.prepared import Prepared
from hexiseq_triton.segments import Segment, whole_documents

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    *([pytest.mark.gpu] if kernel_runs.ON_CARD else []),
]


class Kernel:
    """Stands for a jitted kernel and, once launched, for what was compiled of it."""

    arg_names = ("q", "lse", "num_rows", "stride", "ROWS", "FIRST")

    def __init__(self) -> None:
        self.jitted: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            self.jitted.append((grid, args, constants))
            return Compiled(self)

        return launch


class Compiled:
    n_spills = 0

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *args: self.kernel.compiled.append((grid, args))


def prepared(kernel: Kernel, q: torch.Tensor) -> Prepared:
    constants = {"FIRST": True, "ROWS": 16, "num_warps": 4}
    blocks = [form(q).blocks(16), None]
    return Prepared(kernel, (5,), (8, 64), constants, blocks=blocks)


def test_the_second_launch_goes_past_tritons_lookup_with_all_arguments_in_place() -> None:
    kernel, lse = Kernel(), torch.zeros(2, 8)
    first, second = (torch.zeros(8, 2, 32, dtype=torch.float16) for _ in range(2))
    launch = prepared(kernel, first)

    launch(first, lse)
    launch(second, lse)

    ((grid, args, constants),) = kernel.jitted
    assert (grid, constants) == ((5, 1, 1), {"FIRST": True, "ROWS": 16, "num_warps": 4})
    assert args[0].base is first
    assert args[1:] == (lse, 8, 64)
    ((grid, args),) = kernel.compiled
    assert grid == (5, 1, 1)
    assert args[0].base is second
    assert args[1:] == (lse, 8, 64, 16, True)  # constants in the kernel's own order


def test_a_descriptor_made_without_checks_equals_a_checked_one() -> None:
    kernel, q = Kernel(), torch.zeros(8, 2, 32, dtype=torch.float16)
    launch = prepared(kernel, q)
    for _ in range(2):
        launch(q, q)

    quick = kernel.compiled[0][1][0]
    assert type(quick) is TensorDescriptor
    assert vars(quick) == vars(TensorDescriptor(q, [8, 64], [64, 1], [16, 32]))


def test_a_launch_keeps_no_tensor_alive() -> None:
    kernel, q = Kernel(), torch.zeros(8, 2, 32, dtype=torch.float16)
    launch = prepared(kernel, q)
    launch(q, q)
    kernel.jitted.clear()

    reference = weakref.ref(q)
    del q
    assert reference() is None


def test_a_repeated_launch_works_on_the_new_tensors() -> None:
    case = kernel_runs.Case((70, 3), kv_heads=2)
    inputs = case.inputs()
    kernel_runs.at_once(case, inputs)
    others = [x.roll(1, 0) for x in inputs]
    found = kernel_runs.at_once(case, others)
    exact, lowp = case.dense(others, torch.float64), case.dense(others, case.dtype)
    for a, b, c in zip(found, exact, lowp, strict=False):
        assert_as_close_as(a, b, c)


def test_tensors_of_another_form_get_their_own_launch() -> None:
    """Same shape, other strides: the second call must not run on the first one's arguments."""
    case = kernel_runs.Case((40,), dtype=torch.float32)
    inputs = case.inputs()
    expected = kernel_runs.at_once(case, inputs)
    spread = [torch.stack((x, x), dim=1).flatten(1, 2)[:, : x.shape[1]] for x in inputs]
    assert [x.stride() for x in spread] != [x.stride() for x in inputs]
    for x, original in zip(spread, inputs, strict=True):
        x.copy_(original)
    for a, b in zip(kernel_runs.at_once(case, spread), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_forms_tell_apart_what_the_compiler_does() -> None:
    x = torch.zeros(65, 2, 32, dtype=torch.float16)
    assert form(x) == form(torch.ones_like(x))
    odd = torch.zeros(x.numel() + 1, dtype=torch.float16)[1:].view(x.shape)
    others = [x[:64], x[:, :1], x.float(), x.transpose(0, 1), odd]
    assert len({form(x), *map(form, others)}) == 1 + len(others)


@pytest.mark.parametrize(
    "x",
    [torch.zeros(3, 4), torch.zeros(4, 3).T, torch.zeros(0, 4)[:, ::2], torch.zeros(1, 8)[:, :4]],
    ids=["dense", "turned", "empty", "one row"],
)
def test_a_form_knows_whether_it_is_contiguous(x: torch.Tensor) -> None:
    assert form(x).is_contiguous == x.is_contiguous()


def test_equal_segments_lead_to_one_object() -> None:
    one, other = (tuple(whole_documents([3, 4])) for _ in range(2))
    assert one is not other
    assert interned(one) is interned(other)
    assert interned(list(one)) is interned(one)
    assert interned(one).segments == one
    assert interned(one) is not interned(tuple(whole_documents([3, 5])))


def test_a_changed_list_is_seen() -> None:
    segments = [Segment(0, 0, 3)]
    before = interned(segments)
    segments[0] = Segment(0, 0, 4)
    assert interned(segments) is not before


def test_a_known_tuple_is_not_read_again() -> None:
    class Counted(Segment):
        hashes = 0

        def __hash__(self) -> int:
            Counted.hashes += 1
            return super().__hash__()

    segments = (Counted(0, 0, 3), Counted(1, 0, 5))
    interned(segments)
    seen = Counted.hashes
    assert seen > 0
    for _ in range(10):
        interned(segments)
    assert Counted.hashes == seen
