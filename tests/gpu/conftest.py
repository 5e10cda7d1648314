"""Everything below this folder needs CUDA."""

from pathlib import Path

import pytest

import toolkit


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", params=["bfloat16", "float16", "float32"])
def cuda_artifact(
    request: pytest.FixtureRequest, bert_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("cuda") / request.param
    toolkit.convert(str(bert_checkpoint), out, dtype=request.param, verify=False)
    return out
