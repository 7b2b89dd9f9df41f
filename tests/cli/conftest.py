import pytest

from cli.child import Server


@pytest.fixture(scope="session")
def polyquant():
    """Run the command: polyquant("inspect", path) -> Outcome."""
    server = Server()
    yield server.run
    server.close()
