"""Late interaction on CUDA: expansions that are seen and unseen, in every mode, by the gate."""

from pathlib import Path

import pytest
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

import toolkit
from tests.test_multivector import FIXED, TEXTS, UNSEEN, base, dense, saved
from toolkit.parity import verify_folder


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("attend", [True, False])
def test_every_mode(tmp_path: Path, dtype: str, attend: bool) -> None:
    """With an expansion that is not attended to the kernels get the number of keys of each sequence."""
    expansion = FIXED if attend else FIXED | UNSEEN
    modules = (dense(), MultiVectorMask())
    folder = saved(base(tmp_path / "base"), tmp_path / "saved", *modules, transformer={"query_expansion": expansion})
    toolkit.convert(str(folder), tmp_path / "out", dtype=dtype, verify=False)
    report = verify_folder(tmp_path / "out", folder, device="cuda")
    assert report.passed, report.summary()
    assert {cell.mode for cell in report.cells} == {"eager", "compile", "graph"}
    runner = toolkit.load(tmp_path / "out", device="cuda", mode="graph")
    exact = toolkit.load(tmp_path / "out", device="cpu", mode="eager")
    allowed = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}[dtype]
    for kind in ("query", "document"):
        for ours, theirs in zip(runner.multi_vectors(TEXTS, kind), exact.multi_vectors(TEXTS, kind), strict=True):
            assert (ours - theirs).abs().max() < allowed
