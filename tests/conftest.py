import gc
import os
import signal
import tracemalloc
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: the workers of pytest share the processors already

import numpy as np
import pytest

from kernel_sets import kernels  # noqa: F401 - a fixture of all tests
from polyquant.ops import native
from unsanitized import reason

# A script that starts the suite in the background has SIGINT ignored for it, and for every program that a test starts
# and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def unsynced(fd):
    """Check the file only: files of tests need not survive a power loss; crash/ tests that in separate processes."""
    os.fstat(fd if isinstance(fd, int) else fd.fileno())


for name in ("fsync", "fdatasync"):
    if hasattr(os, name):
        setattr(os, name, unsynced)


@pytest.hookimpl(tryfirst=True)  # before items are selected by their markers
def pytest_collection_modifyitems(config, items):
    for item in items:
        if "engine" in getattr(item, "fixturenames", ()):
            item.add_marker("engine")
            if item.get_closest_marker("slow_with_numpy") and item.callspec.params["engine"] == "numpy":
                item.add_marker("slow")
    if "POLYQUANT_SANITIZED" in os.environ:
        for item in items:
            if (why := reason(item.nodeid.removeprefix("tests/"))) is not None:
                item.add_marker(pytest.mark.skip(reason=why))


def pytest_collection_finish():
    gc.freeze()  # thousands of collected tests: without this, each full collection takes a second on a busy machine


def process_state():
    return {
        "working directory": Path.cwd(),
        "threads": native.threads(),
        "native kernels": native.lib() is not None,
        "numpy's errors": np.geterr(),
        "signal handlers": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        "tracemalloc": tracemalloc.is_tracing(),
    }


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was():
    """A test that changes the process fails itself, not whichever test comes next."""
    before = process_state()
    yield
    assert process_state() == before


@pytest.fixture(params=["native", "numpy"])
def engine(request):
    """Run the test with the native kernels and with the numpy references."""
    if request.param == "native" and native.lib() is None:
        pytest.skip("native kernels are not built or switched off")
    with native.engine(request.param):
        yield request.param


@pytest.fixture(scope="session")
def demo_files(tmp_path_factory):
    """demo_files("llama", "q4_0") -> the embedded model as a GGUF file of that codec, made once."""
    from polyquant.analysis.demo import demo_model
    from polyquant.conversion.convert import convert

    made = {}

    def get(model, codec):
        if (model, codec) not in made:
            path = tmp_path_factory.mktemp("demo") / f"{model}-{codec}.gguf"
            convert(demo_model(model), path, codec=codec)
            made[model, codec] = path
        return made[model, codec]

    return get


@pytest.fixture(scope="session")
def command_server():
    """Runs the command in forks of one process."""
    from cli.child import Server

    server = Server()
    yield server
    server.close()
