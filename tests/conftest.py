import pytest

from polyquant.ops import native


@pytest.fixture(params=["native", "numpy"])
def engine(request):
    """Run the test with the native kernels and with the numpy references."""
    if request.param == "native" and native.lib() is None:
        pytest.skip("native kernels are not built or switched off")
    with native.engine(request.param):
        yield request.param
