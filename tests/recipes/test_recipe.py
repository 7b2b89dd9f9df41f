import pytest
from gguf import GGUFReader

from golden import VECTORS
from polyquant.errors import PlanError, PolyquantError, UnknownNameError
from polyquant.recipes.reading import builtin_recipes, load_recipe, parse_rule
from polyquant.recipes.recipe import LAYERS, Facts

LLAMA_QUANTIZE = [
    ("tiny-llama-untied", "Q2_K", Facts(layers=2, gqa=2)),
    ("tiny-llama-untied", "Q4_K_M", Facts(layers=2, gqa=2)),
    ("tiny-llama-untied", "Q4_0", Facts(layers=2, gqa=2)),
    ("tiny-llama-untied", "Q8_0", Facts(layers=2, gqa=2)),
    ("tiny-llama-untied", "IQ4_XS", Facts(layers=2, gqa=2)),
    ("tiny-llama-untied", "TQ2_0", Facts(layers=2, gqa=2)),
    ("tiny-llama-tied", "Q4_0", Facts(layers=1, gqa=4, tied=True)),
    ("tiny-bitnet", "TQ1_0", Facts(layers=2, gqa=2, tied=True)),
]


@pytest.mark.parametrize("model, name, facts", LLAMA_QUANTIZE, ids=lambda x: str(x)[:24])
def test_recipes_match_llama_quantize(model, name, facts):
    recipe = builtin_recipes()[name.lower()]
    for tensor in GGUFReader(VECTORS / "models" / model / f"{model}-{name}.gguf").tensors:
        if len(tensor.shape) > 1:
            chosen, _ = recipe.choose((tensor.name,), facts)
            assert chosen == tensor.tensor_type.name.lower(), tensor.name


def test_file_types_equal_the_vectors():
    for model, name, _ in LLAMA_QUANTIZE:
        file = GGUFReader(VECTORS / "models" / model / f"{model}-{name}.gguf")
        assert file.fields["general.file_type"].contents() == builtin_recipes()[name.lower()].file_type


@pytest.mark.parametrize("layers, expected", [(32, 16), (2, 1), (1, 1), (22, 10)])
def test_more_bits_selects_about_half_of_the_layers(layers, expected):
    assert sum(LAYERS["more_bits"](i, layers) for i in range(layers)) == expected


def test_a_rule_overrides_the_recipe():
    recipe = load_recipe("q4_k_m").with_rules([parse_rule("*ffn_down*=q8_0")])
    assert recipe.choose(("blk.0.ffn_down.weight",), Facts(layers=4))[0] == "q8_0"
    assert recipe.choose(("blk.0.ffn_up.weight",), Facts(layers=4))[0] == "q4_k"


def test_a_recipe_file_extends_a_builtin_one(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('extends = "q4_k_m"\nrules = [{ match = "output", codec = "q8_0" }]\n')
    recipe = load_recipe(str(file))
    assert recipe.choose(("output.weight",), Facts())[0] == "q8_0"
    assert recipe.choose(("blk.0.attn_q.weight",), Facts())[0] == "q4_k"


@pytest.mark.parametrize(
    "text, hint",
    [
        ("base = 'q4_k'\nnonsense = 1", "nonsense"),
        ("rules = [{ match = '*' }]", "match and codec"),
        ("rules = [{ match = '*', codec = 'q4_k', layers = 'odd' }]", "layers must be one of"),
        ("base = 'q9_k'", "did you mean"),
        ("base = ", "not a readable recipe"),
    ],
)
def test_a_bad_recipe_file_is_a_one_line_error(tmp_path, text, hint):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(PolyquantError, match=hint) as caught:
        load_recipe(str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["q4_k", "=q4_k", "*="])
def test_a_bad_rule_is_refused(text):
    with pytest.raises(PlanError):
        parse_rule(text)


def test_unknown_names_suggest_similar_ones():
    with pytest.raises(UnknownNameError, match="q4_k_m"):
        load_recipe("q4_km")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('base = "q9_z"', "no codec is named 'q9_z'"),
        ('[[rules]]\nmatch = "*"\ncodec = "gptq.9"', "no codec is named 'gptq.9'; did you mean"),
        ('extends = "q4_k_x"', "no recipe is named 'q4_k_x'; did you mean q4_k_s"),
    ],
)
def test_an_unknown_name_in_a_file_tells_the_file(tmp_path, text, says):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UnknownNameError) as caught:
        load_recipe(str(path))
    assert str(caught.value).startswith(f"{path}: {says}")
