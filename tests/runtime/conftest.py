import pytest

from polyquant.analysis.demo import demo_model
from polyquant.conversion.convert import convert


@pytest.fixture(scope="session")
def demo_files(tmp_path_factory):
    """demo_files("llama", "q4_0") -> the embedded model as a GGUF file of that codec, made once."""
    made = {}

    def get(model, codec):
        if (model, codec) not in made:
            path = tmp_path_factory.mktemp("demo") / f"{model}-{codec}.gguf"
            convert(demo_model(model), path, codec=codec)
            made[model, codec] = path
        return made[model, codec]

    return get
