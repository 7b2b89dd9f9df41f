import pytest


@pytest.fixture(scope="session")
def polyquant(command_server):
    """Run the command: polyquant("inspect", path) -> Outcome."""
    return command_server.run
