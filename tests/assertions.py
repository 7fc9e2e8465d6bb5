"""How close is close enough: measured against plain torch in the same dtype, and not guessed."""

from __future__ import annotations

import torch

MAX_RATIO = 2.0
RMS_RATIO = 1.25
ULPS = 2.0
FLOOR = 1e-5
"""Most absolute error where plain torch makes none."""


def assert_as_close_as(
    actual: torch.Tensor, exact: torch.Tensor, lowp: torch.Tensor, *, leniency: float = 1.0
) -> None:
    """Fail unless `actual` is about as near to `exact` as plain torch's `lowp` is.

    The largest error may be twice that of `lowp` plus two units in the last place at the largest
    magnitude; the RMS error 1.25 times that of `lowp` (plus the same floor).

    Args:
        actual: what the kernel gave, in any dtype.
        exact: the same computed in float64.
        lowp: the same computed by plain torch in the dtype under test.
        leniency: multiplies the two ratios. Above 1 only for a named defect of the test bed.
    """
    assert actual.shape == exact.shape
    assert actual.isfinite().all(), "not finite"
    if not exact.numel():
        return
    error, plain = ((x.double() - exact).abs() for x in (actual, lowp))
    ulp = torch.finfo(lowp.dtype).eps * float(exact.abs().max())
    if not plain.max():
        assert float(error.max()) <= FLOOR
        return
    most = leniency * MAX_RATIO * float(plain.max()) + ULPS * ulp
    assert float(error.max()) <= most, f"max error {error.max():.3g}, allowed {most:.3g}"
    rms, plain_rms = (float(x.square().mean().sqrt()) for x in (error, plain))
    most = max(leniency * RMS_RATIO * plain_rms, FLOOR * float(exact.abs().max()))
    assert rms <= most, f"RMS error {rms:.3g}, allowed {most:.3g} (plain torch: {plain_rms:.3g})"
